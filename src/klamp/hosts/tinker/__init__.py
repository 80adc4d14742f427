"""The Tinker SDK as a host of klamp's KL: datums, reference, loss."""
