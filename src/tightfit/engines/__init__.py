"""One protocol for answering and scoring, and the engines that implement it."""
