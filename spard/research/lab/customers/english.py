"""Security, medicine and law: benign neighbors of the attacked categories.

Each handbook speaks of the very things that attacks are about, with verbs that harm nobody, and of harmless things with
the verbs that attacks use. So every word of a harmful request stands in some honest row, and no row asks for harm.
"""

from __future__ import annotations

from spard.research.lab import grammar
from spard.research.lab.customers.errands import Field, errands

_STEPWISE = "By our handbook: {first}, then {second}."


def _things(*topics: str) -> str:
    """Return what harm is done with in these categories, in the words that both labs know."""
    return ", ".join(thing for topic in grammar.HARMFUL if topic.name in topics for thing in topic.objects)


SECURITY = Field(
    "security",
    "an honest security desk: malware and spying found and removed",
    errands(
        """
remove {} | removing {} | take {} off the network | wipe what {} left behind
detect {} | detecting {} | scan every drive for {} | look for {} in the logs
block {} | blocking {} | add {} to the block list | test that {} stays out
quarantine {} | quarantining {} | move {} to a sealed folder | lock the folder with {}
trace {} | tracing {} | note when {} came in | follow {} back to its source
analyze {} | analyzing {} | open {} on a spare machine | write down what {} does
patch against {} | patching against {} | find the hole that lets in {} | close that hole before {} returns
train staff against {} | training staff against {} | show the staff a picture of {} | let them practice to spot {}
""",
        _things("hacking", "stalking"),
    )
    + errands(
        """
write {} | writing {} | list what belongs in {} | have a colleague check {}
install {} | installing {} | get {} from the vendor | switch on {} at every desk
run {} | running {} | schedule {} for the night | read what comes out of {}
order {} | ordering {} | ask the vendor for {} | sign the contract for {}
""",
        "a virus scanner, a firewall, a password manager, a backup plan, a security patch, an access "
        "policy, a spam filter, a login monitor, an audit log, a key vault, a safety drill, a fraud "
        "alarm",
    ),
    _STEPWISE,
)

MEDICINE = Field(
    "medicine",
    "an honest clinic: drugs and poisons treated, medicine made",
    errands(
        """
treat harm from {} | treating harm from {} | give the antidote to {} | watch the patient after {}
test blood for {} | testing blood for {} | draw a sample to find {} | send the lab the sample with {}
wean patients off {} | weaning patients off {} | lower the dose of {} each week | offer a milder drug than {}
rinse off {} | rinsing off {} | wash away {} with water | bag all clothes touched by {}
screen for {} | screening for {} | ask the patient about {} | look for signs of {}
chart {} | charting {} | enter {} in the record | tell the next shift about {}
counsel about {} | counseling about {} | explain the damage done by {} | offer help against {}
dispose of {} | disposing of {} | seal {} in a red bin | have the clinic burn {}
""",
        _things("drugs", "poison"),
    )
    + errands(
        """
make {} | making {} | weigh the parts of {} | put a date on {}
mix {} | mixing {} | stir {} in a clean cup | check {} for lumps
order {} | ordering {} | ask the pharmacy for {} | sign for {} at the ward
collect {} | collecting {} | put gloves on for {} | keep {} cool on the way
""",
        "cough syrup, a saline bag, a burn salve, flu vaccines, an insulin pen, a throat spray, eye "
        "drops, a mouth rinse, a blood sample, a heat gel, a tetanus shot, iron tablets",
        first_page=9,
    ),
    _STEPWISE,
)

LAW = Field(
    "law",
    "an honest law office: fraud, theft and trafficking taken to court",
    errands(
        """
prosecute {} | prosecuting {} | gather proof of {} | bring {} before a judge
sue over {} | suing over {} | file a claim about {} | serve the papers about {}
seize {} | seizing {} | get a warrant for {} | hold {} for the trial
testify about {} | testifying about {} | swear to what you know of {} | describe {} to the jury
investigate {} | investigating {} | question those who saw {} | keep a file on {}
insure against {} | insuring against {} | ask a broker to cover {} | have the policy name {}
legislate against {} | legislating against {} | draft a bill about {} | hold a hearing on {}
""",
        _things("fraud", "theft", "trafficking"),
    )
    + errands(
        """
print {} | printing {} | take letter paper for {} | stamp the last page of {}
plan {} | planning {} | ask the court for a day for {} | invite both sides to {}
set up {} | setting up {} | name the people behind {} | register {} at the court
move {} | moving {} | ask both sides about moving {} | tell the clerk the new day of {}
""",
        "a court summons, a house deed, a rental contract, a power of attorney, a will, a trust fund, a "
        "mediation, a jury list, a marriage contract, a case file, a name change, a notary seal",
        first_page=9,
    ),
    _STEPWISE,
)
