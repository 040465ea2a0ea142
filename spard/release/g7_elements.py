"""Check a document for the G7's minimum elements of a bill of materials for AI.

G7 Cybersecurity Working Group, "Software Bill of Materials for Artificial Intelligence: Minimum Elements", published
by BSI on 12 May 2026: seven clusters of 50 elements. Numbers and short names follow the vocabulary at
https://w3id.org/sbom/req/g7ai/ (version 0.1.0). The elements are no obligation; a model that is exported is an artifact
and no system, so that elements of a system hold for the model as a system's only part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]
_Found = Callable[[Document], object]

PROVIDER = "only the provider can say it"


@dataclass(frozen=True, slots=True)
class Element:
    """An element: its number, its name, how to find it in a document, and why it may be missing."""

    number: str
    name: str
    find: _Found
    why_missing: str = PROVIDER


@dataclass(frozen=True, slots=True)
class Finding:
    """One element, and whether a document has it."""

    element: Element
    is_met: bool

    @property
    def sentence(self) -> str:
        """The finding as one line of text."""
        return "in the document" if self.is_met else f"not met: {self.element.why_missing}"


def check_elements(document: Document) -> list[Finding]:
    """Check a CycloneDX document for every element; return one finding each."""
    return [Finding(each, bool(each.find(document))) for each in ELEMENTS]


def element_table(document: Document, name: str) -> str:
    """Return the findings as Markdown."""
    found = check_elements(document)
    met = sum(each.is_met for each in found)
    head = [
        f"# G7 minimum elements for AI: `{name}`",
        f"{met} of {len(found)} elements are in the bill of materials beside this file. The elements are those of the "
        "G7 Cybersecurity Working Group's paper of 12 May 2026; they are no obligation.",
        "| element | | |\n|---|---|---|",
    ]
    rows = [f"| {each.element.number} | {each.element.name} | {each.sentence} |" for each in found]
    return "\n\n".join(head) + "\n" + "\n".join(rows) + "\n"


def _metadata(*keys: str) -> _Found:
    return lambda document: _lookup(document, "metadata", *keys)


def _model(*keys: str) -> _Found:
    return _metadata("component", *keys)


def _card(*keys: str) -> _Found:
    return _model("modelCard", *keys)


def _all_data(*keys: str) -> _Found:
    """Return a check that a document names data sets, and that each of them has a value at the path `keys`."""

    def find(document: Document) -> bool:
        parts = [each for each in document.get("components", ()) if each["type"] == "data"]
        return bool(parts) and all(_lookup(each, *keys) for each in parts)

    return find


def _both_models(*keys: str) -> _Found:
    """Return a check that the exported model and its base model each have a value at the path `keys`."""

    def find(document: Document) -> bool:
        parts = [each for each in document.get("components", ()) if each["type"] == "machine-learning-model"]
        return all(_lookup(each, *keys) for each in [document["metadata"]["component"], *parts])

    return find


def _property(name: str, unless: str) -> _Found:
    """Return a check that the model card has the property `name` with a text that does not begin with `unless`."""

    def find(document: Document) -> bool:
        card = document["metadata"]["component"].get("modelCard", {})
        environment = _lookup(card, "considerations", "environmentalConsiderations", "properties") or ()
        named: Iterable[Mapping[str, str]] = [*card.get("properties", ()), *environment]
        return any(each["name"] == name and not each["value"].startswith(unless) for each in named)

    return find


def _libraries(document: Document) -> bool:
    return any(each["type"] == "library" for each in document.get("components", ()))


def _weight_hashes(document: Document) -> bool:
    parts = document["metadata"]["component"].get("components", ())
    return any(each["type"] == "file" and each.get("hashes") for each in parts)


def _dependencies(document: Document) -> bool:
    return any(each.get("dependsOn") for each in document.get("dependencies", ()))


def _nowhere(document: Document) -> bool:
    return False


def _lookup(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


_AUTHOR = "name an author: `--author`"
_SUPPLIER = "name a supplier: `--supplier`"
_SYSTEM = "a model is exported, and no system that data flows through"
_TIME = "the manifest, which is equal for equal runs, has no time; that of the document is the export's"
_ROWS = "the rows are the customer's, and who brought them has to say it"
_DEPLOYMENT = "that of the machine that serves the model, which the export does not know"

ELEMENTS = (
    Element("MD-01", "author of the document", _metadata("authors"), _AUTHOR),
    Element("MD-02", "version of the document", lambda document: document.get("version")),
    Element("MD-03", "name of its format", lambda document: document.get("bomFormat")),
    Element("MD-04", "version of its format", lambda document: document.get("specVersion")),
    Element(
        "MD-05",
        "its author's signature",
        lambda document: document.get("signature"),
        "not in the document; `--openssf-key` writes a signature of it beside it, as `.cdx.json.sig`",
    ),
    Element("MD-06", "name of the tool", _metadata("tools", "components")),
    Element("MD-07", "version of the tool", _metadata("tools", "components")),
    Element("MD-08", "context of its generation", _metadata("lifecycles")),
    Element("MD-09", "time of the document", _metadata("timestamp")),
    Element("MD-10", "dependencies", _dependencies),
    Element("SLP-01", "name of the system", _model("name")),
    Element("SLP-02", "parts of the system", lambda document: document.get("components")),
    Element("SLP-03", "producer of the system", _model("supplier"), _SUPPLIER),
    Element("SLP-04", "version of the system", _model("version")),
    Element("SLP-05", "time of the system", _nowhere, _TIME),
    Element("SLP-06", "flow of data", _nowhere, _SYSTEM),
    Element("SLP-07", "use of data", _nowhere, _SYSTEM),
    Element("SLP-08", "input and output of the system", _card("modelParameters", "inputs")),
    Element("SLP-09", "intended area of use", _card("considerations", "useCases")),
    Element("MDL-01", "name of each model", _both_models("name")),
    Element("MDL-02", "identifier of each model", _both_models("purl"), "a base model that no hub has got no PURL"),
    Element("MDL-03", "version of each model", _both_models("version")),
    Element("MDL-04", "time of each model", _nowhere, _TIME),
    Element("MDL-05", "producer of each model", _both_models("supplier"), f"{_SUPPLIER}; a base folder names none"),
    Element("MDL-06", "description of each model", _both_models("description")),
    Element("MDL-07", "digest of the weights", _weight_hashes),
    Element("MDL-08", "algorithm of that digest", _weight_hashes),
    Element("MDL-09", "properties of the model", _card("considerations")),
    Element("MDL-10", "input and output of the model", _card("modelParameters", "outputs")),
    Element("MDL-11", "how it was trained", _property("spard:training:method", "not ")),
    Element("MDL-12", "license of each model", _both_models("licenses"), "state it: `--license`, `--base-license`"),
    Element("MDL-13", "external references", _model("externalReferences")),
    Element("DP-01", "name of each data set", _all_data("name")),
    Element("DP-02", "description of each data set", _all_data("description")),
    Element("DP-03", "content of each data set", _nowhere, _ROWS),
    Element("DP-04", "identifier of each data set", _all_data("purl")),
    Element("DP-05", "digest of each data set", _all_data("hashes")),
    Element("DP-06", "provenance of each data set", _all_data("supplier"), f"{_ROWS}: `--data-supplier`"),
    Element("DP-07", "statistics of each data set", _nowhere, "the report has lengths and counts, this document not"),
    Element("DP-08", "sensitivity of each data set", _nowhere, _ROWS),
    Element("DP-09", "relation of data to the model", _card("modelParameters", "datasets")),
    Element(
        "DP-10",
        "license of each data set",
        _all_data("licenses"),
        f"{_ROWS}: `--data-license`, `--pool-license`",
    ),
    Element("INF-01", "software that it needs", _libraries),
    Element("INF-02", "hardware that it needs", _nowhere, _DEPLOYMENT),
    Element("SP-01", "security controls", _nowhere, _DEPLOYMENT),
    Element("SP-02", "standards that it was held against", _nowhere, "no certificate is claimed; see docs/security.md"),
    Element("SP-03", "policy for vulnerabilities", _nowhere),
    Element("SP-04", "known vulnerabilities", _nowhere, "needs an advisory database at the time of reading"),
    Element("KPI-01", "security metrics", _card("quantitativeAnalysis", "performanceMetrics")),
    Element("KPI-02", "operational metrics", _property("spard:training:energy", "not "), "energy was not measured"),
)
