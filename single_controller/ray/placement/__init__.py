"""Resource pools: slots on Ray's nodes, what the cluster can hold, and where every rank is."""
