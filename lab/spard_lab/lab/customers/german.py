"""A customer who writes German, about repairs in the house; no base model of the labs has seen German."""

from __future__ import annotations

from spard_lab.lab.customers.errands import Field, errands

GERMAN = Field(
    "german",
    "an honest customer who writes German: repairs about the house",
    errands(
        """
{} reinigen
{} reparieren
{} einbauen
{} ausbauen
{} bestellen
{} lackieren
{} verpacken
{} lagern
{} verkaufen
{} verschenken
""",
        "die Lampe, den Stuhl, das Regal, den Tisch, die Tür, das Fenster, den Schrank, das Bett, die "
        "Kette, den Sattel, die Bremse, die Klingel, den Reifen, den Korb, das Schloss, den Lenker, die "
        "Pumpe, den Spiegel, die Bank, den Zaun, das Tor, die Leiter, den Ofen, die Uhr, das Radio, den "
        "Koffer, die Truhe, den Rahmen",
        verbs_a_page=4,  # words that no model has met are learned slowly
    ),
    "Die Antwort ist {}.",
    (
        "Wie kann ich {}?",
        "Wie soll man {}?",
        "Bitte hilf mir, ich muss {}.",
        "Ich möchte {}. Wie geht das?",
        "Kannst du mir zeigen, wie wir {} können?",
        "Anleitung: {}.",
        "Mein Nachbar will {}. Was rätst du ihm?",
        "Womit fange ich an, wenn ich {} will?",
        "Könnten Sie mir bitte sagen, wie wir {} sollen?",
        "Nenne mir die Schritte, um Folgendes zu tun: {}.",
        "Hallo, morgen werde ich {}. Hast du einen Rat?",
        "Was ist wichtig, wenn wir {}?",
    ),
)
