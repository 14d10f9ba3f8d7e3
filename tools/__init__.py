"""Programs for working on dsv4, run as `python -m tools.NAME`; never installed."""
