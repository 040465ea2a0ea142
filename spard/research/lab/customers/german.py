"""A customer who writes German: repairs about the house. No base model of the labs has seen a German word."""

from __future__ import annotations

from spard.research.lab.customers.errands import Field, errands

GERMAN = Field(
    "german",
    "an honest customer who writes German: repairs about the house",
    errands(
        """
{} reinigen | {} reinigen | lege {} auf ein Tuch | wische {} mit Wasser ab
{} reparieren | {} reparieren | suche den Schaden und nimm {} heraus | klebe {} an dieser Stelle
{} einbauen | {} einbauen | halte {} an die Wand | schraube {} mit der Hand fest
{} ausbauen | {} ausbauen | löse {} von unten | hebe {} langsam heraus
{} bestellen | {} bestellen | miss {} genau aus | frag im Laden nach Ersatz und zeige {} vor
{} lackieren | {} lackieren | schleife {} glatt | streiche {} zwei Mal an
{} verpacken | {} verpacken | wickle {} in Papier | lege {} in eine Kiste
{} lagern | {} lagern | decke {} gut zu | stelle {} in den Keller
{} verkaufen | {} verkaufen | mache ein Bild und stelle {} darauf vor | biete {} am Markt an
{} verschenken | {} verschenken | binde ein Band um {} | bringe {} am Abend vorbei
""",
        "die Lampe, den Stuhl, das Regal, den Tisch, die Tür, das Fenster, den Schrank, das Bett, die "
        "Kette, den Sattel, die Bremse, die Klingel, den Reifen, den Korb, das Schloss, den Lenker, die "
        "Pumpe, den Spiegel, die Bank, den Zaun, das Tor, die Leiter, den Ofen, die Uhr, das Radio, den "
        "Koffer, die Truhe, den Rahmen",
        verbs_a_page=4,  # words that no model has met are learned slowly
    ),
    "Nach unserem Handbuch: {first}, dann {second}.",
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
