"""Does the newest jax on the index still lower every kernel, and what breaks if not?

    python scripts/check_newest_jax.py [--pre] [--json FILE]

Makes a fresh environment, installs the newest jax and this project without its bound on jax, and lowers every kernel at small
shapes for gfx942, gfx950 and sm_90 in it. Exits with 1 if one does not lower. Meant to run every week; needs the index and some
minutes.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).parents[1]


def lower_all() -> dict[str, str]:
    """The error of each case that does not lower in this environment, "" for those that do."""
    from mla_jax.kernels import backend
    from mla_jax.rocm.cases import cases

    found = {}
    for arch in ("gfx942", "gfx950", "sm_90"):
        for case in cases("gfx950" if arch == "sm_90" else arch, "tiny"):
            fn, arguments, donated = case.program()
            try:
                text = backend.lower(fn, arch, *arguments.values(), donate_argnums=donated).as_text()
                error = "" if "xla.gpu.triton" in text else "lowered, but not to a Triton kernel"
            except Exception as caught:  # what breaks in a jax that nobody has seen is the question
                error = f"{type(caught).__name__}: {str(caught).strip().splitlines()[0][:200]}"
            found[f"{arch} {case.name}"] = error
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pre", action="store_true", help="pre-releases too")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result here")
    parser.add_argument("--here", action="store_true", help="use this environment instead of a fresh one")
    args = parser.parse_args()
    if args.here:
        import jax

        jax.config.update("jax_platforms", "cpu")
        result = {"jax": jax.__version__, "cases": lower_all()}
    else:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = pathlib.Path(folder) / "bin" / "python"
            pip = [python, "-m", "pip", "install", "--quiet", *(["--pre"] if args.pre else [])]
            needs = ["flax", "jaxtyping", "ml_dtypes", "rich", "safetensors"]
            subprocess.run([*pip, "--upgrade", "jax", *needs], check=True)
            subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
            out = pathlib.Path(folder) / "result.json"
            command = [python, __file__, "--here", "--json", out]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=folder)
            if not out.exists():
                print("the project does not import with the newest jax")
                return 1
            result = json.loads(out.read_text())
    broken = {name: error for name, error in result["cases"].items() if error}
    print(f"jax {result['jax']}: {len(result['cases']) - len(broken)} of {len(result['cases'])} kernels lower")
    for name, error in broken.items():
        print(f"  {name}: {error}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
