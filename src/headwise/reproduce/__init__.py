"""The claims of the papers, measured: one file per claim, one runner, one table."""
