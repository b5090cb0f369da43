"""The `fastbert` command: parse, call, print."""
