"""What several baselines share: side terms, a simulated harmful step, subspaces and projections of weights."""
