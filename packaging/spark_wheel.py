"""Build the wheel `sluice-spark`: the format `sluice` and the pipelines, without the broker.

    python packaging/spark_wheel.py DIR

Executors of a Spark cluster need this and pyarrow. The modules are those of the wheel `sluice`,
unchanged and not compiled, so that either of the two can be installed, and one of them is enough.
`MODULES` is the transitive closure of their imports; a test compares it with the sources. The wheel
is a zip file that Python can import from, so it also serves `spark-submit --py-files`.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "src"
# Below src: files, and directories with all that is in them.
MODULES: Final = (
    "pyspark_sluice",
    "sluice/__init__.py",
    "sluice/py.typed",
    "sluice/backoff.py",
    "sluice/errors.py",
    "sluice/http_client.py",
    "sluice/units.py",
    "sluice/report",
    "sluice/spark",
)
MADE_AT: Final = (2020, 1, 1, 0, 0, 0)  # equal sources give an equal file
METADATA: Final = """\
Metadata-Version: 2.4
Name: sluice-spark
Version: {version}
Summary: Queues of Sluice as DataFrames: the format sluice for PySpark
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: pyarrow>=18,<27
Provides-Extra: spark
Requires-Dist: pyspark>=4.2,<5; extra == "spark"
Requires-Dist: pandas>=2.2,<3; extra == "spark"
Provides-Extra: delta
Requires-Dist: deltalake>=1,<2; extra == "delta"
Description-Content-Type: text/markdown

{readme}"""
WHEEL: Final = """\
Wheel-Version: 1.0
Generator: sluice
Root-Is-Purelib: true
Tag: py3-none-any
"""


def module_files() -> list[Path]:
    """Return the files of the wheel, below `src`."""
    found: list[Path] = []
    for name in MODULES:
        path = SOURCES / name
        found += [path] if path.is_file() else (one for one in path.rglob("*") if one.is_file())
    return sorted(
        one.relative_to(SOURCES)
        for one in found
        if one.suffix in (".py", ".css", ".md", ".typed") and "__pycache__" not in one.parts
    )


def read_version() -> str:
    """Return the version without importing the package, which may be compiled."""
    tree = ast.parse((SOURCES / "sluice/__init__.py").read_text())
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "__version__":
            assert statement.value is not None
            return str(ast.literal_eval(statement.value))
    raise SystemExit("src/sluice/__init__.py has no __version__")


def build(directory: Path) -> Path:
    """Write the wheel into `directory` and return its path."""
    version = read_version()
    info = f"sluice_spark-{version}.dist-info"
    contents = {str(name): (SOURCES / name).read_bytes() for name in module_files()}
    readme = (SOURCES / "sluice/spark/README.md").read_text()
    contents[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    contents[f"{info}/METADATA"] = METADATA.format(version=version, readme=readme).encode()
    contents[f"{info}/WHEEL"] = WHEEL.encode()
    record = "".join(f"{name},{_hash(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"sluice_spark-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, MADE_AT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return path


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python packaging/spark_wheel.py DIR")
    print(build(Path(sys.argv[1])))
