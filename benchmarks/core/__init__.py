"""What every study is made of: a run, the file of its results, one progress loop, tables and figures."""
