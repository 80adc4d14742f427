"""A run of klamp by verl's own program: `klamp train --backend verl`."""
