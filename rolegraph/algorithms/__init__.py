"""Driver programs, one a file: the loop is the page."""
