"""klamp's KL inside other trainers: what every host needs (`common`), and one folder per host over it."""
