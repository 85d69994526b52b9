"""The web page: planner, data, runs, chat and two models side by side."""
