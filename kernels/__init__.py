"""Triton kernels, installed as `fastbert.kernels`.

With the repository root as working directory this folder is importable as `kernels` and hides the
package of that name, which transformers imports when its distribution is installed. Under that
name it therefore steps aside.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
    _path = [p for p in sys.path if Path(p or ".").resolve() != _root]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _path)
    if _spec is None or _spec.loader is None:
        raise ImportError("this is fastbert's source folder; import fastbert.kernels")
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["kernels"] = _module
    _spec.loader.exec_module(_module)
