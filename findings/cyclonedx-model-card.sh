#!/usr/bin/env bash
# cyclonedx-python-lib 11.12.0: a bill of materials of a model, in CycloneDX 1.6 and 1.7, that is read and written again
#
# Guess: what `Bom.from_json` reads of a valid document, `JsonV1Dot6` writes again, or it says what it leaves out.
# What happens: a model's `modelCard`, with its measurements and limits, and the `data` of a data set, with its address
# and classification, are gone, and nothing is said. (Both are wishes in the library's tracker, 911 and 913.) The result
# is valid, so that a check of it shows nothing. Change such a document as JSON.
#
# Seen on 2026-12-01, the keys that are lost:
#   1.6: of the model {'modelCard'}, of the data set {'data'}
#   1.7: of the model {'modelCard'}, of the data set {'data'}
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check "cyclonedx-python-lib[json-validation]==11.12.0"
cd "$place"
"$place/env/bin/python" -W error - <<'PY'
import json

from cyclonedx.model.bom import Bom
from cyclonedx.output.json import JsonV1Dot6, JsonV1Dot7
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

model = {
    "type": "machine-learning-model",
    "bom-ref": "model",
    "name": "tuned",
    "version": "1",
    "hashes": [{"alg": "SHA-256", "content": "0" * 64}],
    "licenses": [{"license": {"id": "Apache-2.0"}}],
    "properties": [{"name": "method", "value": "LoRA"}],
    "modelCard": {
        "modelParameters": {"task": "text-generation", "datasets": [{"ref": "rows"}]},
        "quantitativeAnalysis": {"performanceMetrics": [{"type": "refused", "value": "0.98"}]},
        "considerations": {"technicalLimitations": ["English only"]},
    },
}
rows = {"type": "dataset", "name": "rows", "contents": {"url": "https://example.org/rows"}, "classification": "public"}
part = {"type": "data", "bom-ref": "rows", "name": "rows", "data": [rows]}
links = [{"ref": "model", "dependsOn": ["rows"]}, {"ref": "rows"}]
for version, enum, write in (("1.6", SchemaVersion.V1_6, JsonV1Dot6), ("1.7", SchemaVersion.V1_7, JsonV1Dot7)):
    document = {"bomFormat": "CycloneDX", "specVersion": version, "version": 1, "metadata": {"component": model}}
    document |= {"components": [part], "dependencies": links}
    written = write(Bom.from_json(document)).output_as_string()
    again = json.loads(written)
    assert JsonStrictValidator(enum).validate_str(json.dumps(document)) is None
    assert JsonStrictValidator(enum).validate_str(written) is None
    lost = [{*model} - {*again["metadata"]["component"]}, {*part} - {*again["components"][0]}]
    print(f"{version}: of the model {lost[0]}, of the data set {lost[1]}")
    assert lost == [{"modelCard"}, {"data"}], "this has changed"
PY
