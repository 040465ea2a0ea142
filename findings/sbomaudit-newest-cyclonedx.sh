#!/usr/bin/env bash
# sbomaudit 0.4.4, with lib4sbom 0.10.4 and cyclonedx-python-lib 11.8.0: a bill of materials in the newest CycloneDX
#
# Guess: a document in CycloneDX 1.7 (ECMA-424, second edition, 2025) passes the check "Up to date CycloneDX Version",
# as the same document in 1.6 does, or the tool says that it does not know the version.
# What happens: it knows versions up to 1.6 and counts the newer one as out of date; one check more fails. Everything
# else in the document is read and checked in both versions alike.
#
# Seen on 2026-11-29:
#   1.6: [x] Up to date CycloneDX Version
#   1.7: [ ] Up to date CycloneDX Version: 1.7
#   other checks that differ: 0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check sbomaudit==0.4.4 lib4sbom==0.10.4 \
  "cyclonedx-python-lib==11.8.0"
cd "$place"
"$place/env/bin/python" - <<'PY'
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6, JsonV1Dot7
from packageurl import PackageURL

bom = Bom()
bom.metadata.component = Component(name="tuned", type=ComponentType.MACHINE_LEARNING_MODEL, bom_ref="model")
part = Component(name="numpy", version="2.4.0", bom_ref="part", purl=PackageURL("pypi", None, "numpy", "2.4.0"))
bom.components.add(part)
bom.register_dependency(bom.metadata.component, [part])
for version, write in (("1.6", JsonV1Dot6), ("1.7", JsonV1Dot7)):
    with open(f"{version}.json", "w") as file:
        file.write(write(bom).output_as_string())
PY
for version in 1.6 1.7; do
  "$place/env/bin/sbomaudit" --offline --verbose --input-file "$version.json" | grep -E '^\[[x ]\]' > "$version.txt" || true
  echo "$version: $(grep 'Up to date CycloneDX' "$version.txt")"
done
others() { grep -vE 'Up to date CycloneDX|Checks (passed|failed)' "$1"; }
echo "other checks that differ: $(diff <(others 1.6.txt) <(others 1.7.txt) | grep -c '^[<>]' || true)"
[[ $(grep 'Up to date CycloneDX' 1.6.txt) == "[x] Up to date CycloneDX Version" ]] || { echo "this has changed"; exit 1; }
[[ $(grep 'Up to date CycloneDX' 1.7.txt) == "[ ] Up to date CycloneDX Version: 1.7" ]] || { echo "this has changed"; exit 1; }
