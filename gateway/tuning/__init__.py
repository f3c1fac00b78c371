"""Tools for those who tune: load, sweep, simulate, plan, advise. Nothing of it runs in the data plane."""
