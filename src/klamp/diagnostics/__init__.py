"""What a run measures: the table of metrics and the functions that compute them."""
