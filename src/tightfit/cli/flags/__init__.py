"""What each verb accepts: declarations only, light enough to print `--help` from."""
