"""`klamp train --backend verl`: verl's arguments, its data files and its reward."""
