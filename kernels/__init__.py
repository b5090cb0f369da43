"""Triton kernels, installed as `fastbert.kernels`.

With the repository root as working directory this folder is importable as `kernels` and hides the
package of that name. Under that name it steps aside for the real one. Where there is none it must
not raise at import: transformers imports every package whose name it finds, to ask its version.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
    _path = [p for p in sys.path if Path(p or ".").resolve() != _root]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _path)
    if _spec is not None and _spec.loader is not None:
        _module = importlib.util.module_from_spec(_spec)
        sys.modules["kernels"] = _module
        _spec.loader.exec_module(_module)
    else:
        __version__ = "0.0.0"

        def __getattr__(name: str):
            raise AttributeError(
                f"no {name!r} here: this is fastbert's source folder; import fastbert.kernels, or "
                "install the package `kernels`"
            )
