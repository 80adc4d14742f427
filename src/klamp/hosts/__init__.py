"""klamp's KL inside other trainers: `common` holds what all of them need, and each has a folder of its own."""
