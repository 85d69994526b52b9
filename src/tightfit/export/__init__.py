"""After training: merge, convert, quantize, and the check that follows each of them."""
