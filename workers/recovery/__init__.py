"""What survives a death: snapshots of ranks, replaced workers, and the groups that continue."""
