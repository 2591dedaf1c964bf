"""The parts of ``scripts/torture``; its docstring says what is proven and how."""
