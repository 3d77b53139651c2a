"""`python -m tarry` in the folder above a checkout without an installation ends here.

There, `import tarry` finds the folder of the checkout, and not the package in its folder `src`.
"""

import sys
from pathlib import Path

folder = Path(__file__).parent
sys.exit(f"{folder} is a checkout of tarry, which is not installed: pip install {folder}")
