"""Writes ``requests.jsonl``: 72 requests of four kinds, in the shuffled order in which such files usually arrive.

python examples/make_requests.py > examples/requests.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

SUPPORT = """You sort messages that customers send to a small shop for bicycle parts. Read the message and answer with
one category and one short reason. The categories are: DELIVERY (late, lost or damaged parcels), RETURN (the customer
wants to send something back), COMPATIBILITY (does a part fit a bicycle), PAYMENT (invoices, refunds, vouchers) and
OTHER. Some examples follow.

Message: The chain you sent is two links short and I would like my money back.
Category: RETURN. The customer wants to send the chain back.

Message: Does the 11-speed cassette fit a freehub made for ten speeds?
Category: COMPATIBILITY. The customer asks whether a part fits.

Message: Tracking says delivered but there is nothing in my letterbox.
Category: DELIVERY. The parcel seems to be lost.

Message: Please send me the invoice with our company's address on it.
Category: PAYMENT. The customer needs another invoice."""

MESSAGES = [
    "My parcel has been in the sorting centre for nine days now.",
    "Can I use these brake pads with carbon rims?",
    "The voucher from your newsletter was not accepted at checkout.",
    "I ordered the wrong saddle. How do I send it back?",
    "Are you looking for a mechanic for the summer?",
    "The box was open and one pedal is missing.",
    "You charged my card twice for order 2231.",
    "Will a 29 inch tube work in a 28 inch tyre?",
    "The jacket is too small, I need a size larger.",
    "Which bottom bracket do I need for a 2016 gravel frame?",
    "Your courier left the wheel in the rain and the box is soaked.",
    "How long does a refund to a bank account take?",
    "I like your shop, the advice on the phone was excellent.",
    "The lamp stopped working after a week, can I return it?",
    "Is the rack strong enough for a child seat?",
    "Why did you split my order into three parcels?",
    "Please cancel the gift wrapping and refund it.",
    "Do the mudguards fit 45 millimetre tyres?",
    "The derailleur hanger is bent, I want a new one or my money.",
    "When will the blue helmets be in stock again?",
    "My address has changed, can the parcel still be redirected?",
    "I paid by transfer on Monday and the order is still open.",
    "Does this dynamo work with rim brakes?",
    "I would like to give back the unused spokes.",
]

ARTICLE = """The harbour town of Lindmar decided in 2019 to heat its old quarter with sea water. Three heat pumps, each as
large as a lorry, stand in a former fish hall beside the quay. They take water from twelve metres depth, where it never falls
below four degrees, and cool it by three degrees before it returns to the bay. The heat goes into a ring of insulated pipes
that is 6.4 kilometres long and serves 1,180 flats, two schools and the swimming baths. The work cost 31 million crowns, of
which the state paid a third. In the first winter one of the pumps failed twice, because mussels had grown in the intake, and
the town had to start the old oil boiler for eleven days. Since then divers clean the intake every six weeks, and a grid with
narrower bars keeps the larvae out. The town council says that the oil burnt for heating has fallen by 92 per cent. Residents
pay about as much as before, but their bills no longer follow the price of oil. Critics had feared that the colder water would
harm the eelgrass in the bay. The university has measured the meadow twice a year since the beginning and has found no change
beyond forty metres from the outlet. The neighbouring town of Hav now plans a plant of its own, with a store of hot water as a
buffer so that the pumps can run at night, when electricity is cheap."""

QUESTIONS = [
    "How many flats does the ring serve?",
    "Why did a pump fail in the first winter?",
    "What did the work cost, and who paid a part of it?",
    "What did critics fear?",
    "How deep is the water that the pumps use?",
    "What does the town of Hav plan to do differently?",
    "How is the intake kept clean today?",
    "By how much has the use of oil fallen?",
    "Where do the heat pumps stand?",
    "How long is the ring of pipes?",
    "Did the residents' bills go up?",
    "What has the university measured?",
    "When did the town decide to use sea water?",
    "How long was the oil boiler needed?",
    "Write one sentence that sums up the article.",
    "Give the article a headline of at most eight words.",
]

NOTES = [
    "Team call, Tuesday. Anna: the import job takes four hours, must be under one. Ben found that 80 per cent of it is spent "
    "in one query without an index. Index on Thursday, measure again on Friday. Release moves to the 14th.",
    "Site visit at the bakery. Oven two loses heat at the door seal, oven three is fine. New seals cost 240 each. Owner wants "
    "an offer by Monday and the work done outside baking hours.",
    "Parents' evening. The playground needs shade. Two proposals: sails for 6,000 or trees for 2,500 which take years. Vote "
    "was 14 to 9 for trees now and one sail over the sand pit.",
    "Library board. Opening hours on Saturday are extended to 18:00 for a trial of three months. Volunteers are needed. The "
    "old catalogue is switched off at the end of the year.",
    "Garden club. Late frost killed the early potatoes on plots 3 to 9. Seed potatoes are ordered together. The water pump is "
    "repaired. Next meeting in May, with a talk about bees.",
    "Project review. The sensor drifts by two per cent a month. Supplier blames the housing. We test two units with the new "
    "housing for six weeks before we order a thousand.",
    "Choir committee. The concert is moved to the church because the hall is closed. 220 seats instead of 300, so tickets "
    "cost two more. The alto section is looking for three voices.",
    "Weekly sync. Support tickets fell from 140 to 95. The most frequent question is still how to reset a password. Design "
    "will move the link to the first page.",
    "Ferry operator. The evening departure is dropped in winter, as on average nine people used it. A bus replaces it. The "
    "islanders ask for a later bus on Fridays.",
    "Workshop safety. The guard of the table saw was removed again. From now on the saw is locked and the key is with Mira. "
    "First-aid box was incomplete and has been refilled.",
    "Budget talk. Printing is 30 per cent over plan, travel 50 per cent under. Nobody wants to cut the newsletter. Printing "
    "moves to the cheaper paper from issue seven.",
    "Field day. Drone survey of the north meadow done, south meadow postponed because of wind. Pictures show two wet spots. "
    "The farmer will check the old drain pipes.",
]

TAGLINES = [
    "a bakery that opens at night",
    "a repair cafe for radios",
    "a ferry with a library",
    "a school for bee keepers",
    "a cinema in a greenhouse",
    "a hotel for bicycles",
    "a museum of maps",
    "a shop for left-handed tools",
    "a radio station for gardeners",
    "a tram that sells soup",
    "a swimming bath heated by the sea",
    "a mobile workshop for violins",
    "a mountain hut with a bookshop",
    "a night school for clock makers",
    "a market for second-hand lenses",
    "a studio for paper boats",
    "a tea house in a lighthouse",
    "a travelling puppet theatre",
    "a choir for people who cannot sing",
    "a farm that lends its goats",
]


def chat(custom_id: str, system: str, user: str, max_tokens: int) -> dict[str, Any]:
    """One chat request with greedy decoding."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """One text completion with a seed."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": 7,
        "stop": ["\n"],
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def requests() -> list[dict[str, Any]]:
    """All requests, shuffled with a fixed seed."""
    rows = [chat(f"support-{i:02}", SUPPORT, f"Message: {text}", 24) for i, text in enumerate(MESSAGES)]
    reader = f"Answer questions about this article in one or two sentences.\n\n{ARTICLE}"
    rows += [chat(f"article-{i:02}", reader, text, 48) for i, text in enumerate(QUESTIONS)]
    editor = "You turn rough notes into two or three complete sentences for people who were absent. Leave nothing important out."
    rows += [chat(f"notes-{i:02}", editor, text, 96) for i, text in enumerate(NOTES)]
    rows += [completion(f"tagline-{i:02}", f"A cheerful slogan for {text}:", 32) for i, text in enumerate(TAGLINES)]
    random.Random(20).shuffle(rows)
    return rows


if __name__ == "__main__":
    for request in requests():
        sys.stdout.write(json.dumps(request) + "\n")
