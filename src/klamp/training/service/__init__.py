"""klamp's trainer with the weights at a service of the Tinker SDK: `klamp train --backend tinker`."""
