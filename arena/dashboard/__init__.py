"""The dashboard: a run watched in a browser, live, and in a file."""
