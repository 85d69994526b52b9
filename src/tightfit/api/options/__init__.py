"""The options of every verb, declared once. Light: loaded before `--help` is printed."""
