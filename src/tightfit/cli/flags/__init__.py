"""What the command line adds to each verb's options: how the result is shown. As light as those."""
