"""Records of the groups that run on a cluster: who has them, and how another driver takes one over."""
