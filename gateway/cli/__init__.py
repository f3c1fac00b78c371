"""The commands of the `gateway` console script, one file per group."""
