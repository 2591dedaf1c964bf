"""What users need to test against this package, and this package to test itself.

``policy`` is a small model with exact log probabilities, ``engine`` serves it as vLLM would,
``serving`` puts that on a port, and ``agent`` is a harness that talks to it. ``contract`` is the suite
that every store must pass, and ``memory_store`` one that passes it without a disk. ``replay`` tries an
engine adapter on recorded traffic. Import the module that you need; this package itself loads nothing.
"""

import sys

# The contract suite is plain asserts in a library, whose values pytest shows only if it is told.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("token_id_capture.testing.contract")
