"""klamp's trainer with the weights at a Tinker service: `klamp train --backend tinker`."""
