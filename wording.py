"""
How itineraries are worded: the patterns by which format_plan.py reads them. Quantifiers over free
text are bounded, so that no pattern is worse than linear in hostile text.
"""
import re


def pattern(text):
    """Compile a pattern that ignores case; line breaks and indentation are for the eye alone."""
    return re.compile(re.sub(r"\n\s*", "", text), re.I)


CARDINALS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]
SHORT = ["1st", "2nd", "3rd", "4th", "5th", "6th", "7th"]
NUMBERS = {word: n for row in (CARDINALS, ORDINALS, SHORT) for n, word in enumerate(row, 1)}
EMOJI = r"[^\w\s\[\]({\"'$#@&!?.,:;/\\|<>=+~^%)}*`-]"  # and other marks that are no letters
MONTH = r"""(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|
    sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"""
WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
DATE = pattern(rf"""(?:\b{WEEKDAY},?\s*)?
    (?:\b{MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?\b|\b\d{{1,2}}(?:st|nd|rd|th)?\s+{MONTH}|
    \b\d{{4}}-\d\d-\d\d\b|\b\d{{1,2}}/\d{{1,2}}(?:/\d{{2,4}})?\b)
    (?:,?\s*20\d\d\b)?(?:,?\s*\(?{WEEKDAY}\)?(?!\s(?-i:[A-Z])))?""")
DATE_FIRST = pattern(rf"(?:{DATE.pattern})?[ :,.)–—-]*")
DAY = pattern(rf"""[(\[<]?(?:(?:itinerary|plan) for |on\s+)?(?:(?:the|your|our)\s+)?
    (?:(?:days?[\s_-]?\s*[:#]?\s*|d(?=\d))(\d{{1,2}}|{'|'.join(CARDINALS)})\b(?:/\d{{1,2}}\b)?
    (?:\s?(?:-|–|&|and|to)\s?(?:day\s*)?(\d{{1,2}})\b(?!:\d|\s*{MONTH}|[/-]))?|
    ({'|'.join(ORDINALS + SHORT)}|next|following|final|last)\s+(?:day|morning)\b)[^\w$~]{{0,3}}""")
# behind it: "1 (of 3)", and behind a date "(Day 1)"
BESIDE_DAY = pattern(r"\A[^\w\[\](]*\(?\s*(?:of\ \d|days?\s*\d{1,2})\b\s*\)?\W{0,3}")
DATED = pattern(rf"(?:on\s+|date\s*:\s*)?(?:{DATE.pattern}|{WEEKDAY}(?=$|,|:|\s+[a-z]|\s\(day))")

# a field: label, colon, value
LABELS = {
    "city": r"current[ _]city|city|location|destination|route",
    "transportation": r"""transport(?:ation)?|travel|getting (?:there|around|back|home)|return|
        departure|train|bus|uber|lyft|(?:rental )?car|flights?|flight (?:number|no\.?|details)|
        (?:self-?\s?)?driv(?:e|ing)|taxi""",
    "breakfast": "breakfast|brunch", "lunch": "lunch", "dinner": "dinner|supper|dining",
    "attraction": r"""attractions?|activit(?:y|ies)|sightseeing|sights?|visits?|explore|
        (?:places|things) to (?:visit|see|do)""",
    "accommodation": r"""accommodations?|hotels?|lodging|stay|overnight(?: stay)?|check-?\s?in|
        where to stay|airbnb|sleep"""}
LABEL = pattern(rf"""(?:(?:early|late|mid|morning|midday|noon|afternoon|evening|night|optional|main|
    outbound|inbound|return|first|second|third|additional|daily|suggested|recommended|planned|
    other|local|day)[\s-]+){{0,2}}
    (?:{'|'.join(f'(?P<{slot}>{label})' for slot, label in LABELS.items())})
    (?:\s+(?:visits?|spots?|details?|plan|mode|time|venue|restaurant|choice|option|recommendation|
    night \d|for [\w ]{{1,30}}|in (?-i:[A-Z])[\w.' ]{{1,30}}|
    (?:at|@) \d{{1,2}}(?!\d)(?::\d\d)?\s?(?:[ap]\.?m\.?)?))?
    \s*#?\d{{0,2}}\s*(?:[^\w\s!-~–—]{{1,3}}\s*)?(?:\([^()]{{0,60}}\)\s*)?
    (?::|\s[-–—|@]\s|=|$)\s*""")
CITY_LABEL = pattern(r"(?:city|location|where)\s*:\s*")
NEXT_FIELD = pattern(rf"""(?:\s*[|;•·]|(?<=\)):)\s*(?=(?:{'|'.join(LABELS.values())})\s{{0,2}}
    \d?:)|\s•\s(?=(?:self-|driv|taxi|fl[iy]))|(?:[.,]|\s/)\s+
    (?=(?:transport(?:ation)?|breakfast|lunch|dinner|attractions?|accommodations?)\s{{0,2}}
    (?::|[-–]\s))""")

# prose: what announces a slot in a sentence
CUE = pattern(r"""(?<![\w'-])(?:
    (?P<breakfast>breakfast|brunch)|(?P<lunch>lunch)|(?P<dinner>dinner|supper)|
    (?P<out>check(?:ing|s)?[ -]?out(?= (?:of|from|at|by)\b|:|$))|
    (?P<accommodation>check(?:s|ing)?[ -]?in(?:to|\s+to|\s+at|\s*:)?|
    (?:stay(?:ing)?(?: overnight| the night| again)?|overnight(?: stay)?|
    (?:spend(?:ing)?|for) the night|sleep(?:ing)?|accommodation) (?:at|in)|accommodation)|
    (?P<transportation>(?:self-?\s?)?driv(?:e|ing)|flights?|fly(?:ing)?|taxi|cab|uber|lyft|train|
    bus|(?:rental )?car)|
    (?P<attraction>visit(?:ing)?|explor(?:e|ing)|(?:(?-i:t)|(?<![a-z]\s)t)our(?:ing|\ of)?|see|
    stop (?:at|by)|discover|(?:stroll|wander)(?:ing)? (?:through|along|around)|check out|
    head(?:ing)? to|make your way to|
    (?<!in the )(?:morning|afternoon|day|hours?) (?:is spent )?at(?! \d)))(?![\w'])""")
AT_A_PLACE = pattern(r"""\s*(?:(?:reservations?|stop|break|out)\s+)?(?:\([^()]{0,40}\)\s*)?
    (?::|-|–|(?:at|from|in|with|is|will be)\b|
    ,?\s*(?:head|go|try|visit|eat|we|stop|enjoy|dine|you)\b)""")
BRIDGE = pattern(r"""(?:[\s,;]|\b(?:and|then|before|after|followed|by|you|we|will|can|have|enjoy|
    eat|grab|take|a|your)\b){1,12}$""")
LEAD = pattern(r"""(?:at|around) (?:noon|\d[\d:]*(?:\s?[ap]\.?m\.?)?) (?=at )|
    (?:(?:have|enjoy|grab|eat|dine|dining|try|start|breakfast|brunch|lunch|dinner|
    supper|meal|reservations?|served|late|early|quick|light|delicious|nice|your|our|a|an|the|
    night|with|for|check(?:ing|-in)?|stay(?:ing)?|overnight|spend|sleep|return|back|head(?:ing)?|
    go(?:ing)?|continue|stop|finally|we|you|will|be)\s+){0,8}
    (?:at|to|into|in|from|by|visit(?:ing)?|explor(?:e|ing)|tour|see|is|try|enjoy)\b:?\s+|
    (?:start|begin|grab|treat|have|enjoy|dine|eat|try|head|stop|relax|unwind|check|stay|kick|savor|
    indulge|fuel|settle|finish|end|wrap|sample|feast|celebrate|spend)\b(?:\s(?-i:[a-z']+)){0,6}?
    \s(?:at|to|from|by|in|with)\s+(?=[\"\[]?(?-i:[A-Z\d]))|
    [\U0001F000-\U0001FAFF\u2615\uFE0F]+\s+|[\s:;,.|)\]\"–—-]+|[&/+•]\s|
    \d{1,2}[.)](?:\s*(?=\[)|\s)|(?:and|then|finally|(?-i:the))\s+|
    (?:your )?(?:restaurant|venue|place|location|hotel|property|spot|name)(?: name)?\s*[:,]\s*""")
CLOCK = r"""\(?\d{1,2}(?::\d\d)?\s*(?:[ap]\.?m\.?)?
    (?:\s*(?:-|–|to)\s*\d{1,2}:?\d{0,2}\s*(?:[ap]\.?m\.?)?)?\)?"""
TIME = pattern(rf"""(?:(?:early |late |mid-?)?(?:morning|noon|midday|afternoon|evening|night)\b
    (?!\sat\s)\s*(?:{CLOCK})?|{CLOCK}(?=\s*[:|–—-]))(?:\s*[:|–—,-])?\s*""")

FOR_MEAL = re.compile(r"""((?:(?:of|the|at|in|on|by|and|de|la|for|[A-Z\d"&+(-][^\s;]*)\s+){1,8}?)"""
                      r"""(?:for (?:an? |your |the )?(?:\w+ )?|\()$""")  # "X for lunch", "(lunch)"

# what is no venue
NO_VENUE = pattern(r"""\W*$|-+\s*(?:\(|$|[.;|])|(?:none|n/?a|nil|null|nothing|tbd|
    there (?:is|are) no|skip(?:ped)?|home(?=\W*$)|check(?:ing)?[ -]?out|
    (?:after |from )?\d[\d:]* ?[ap]\.?m(?=\W*$)|
    not (?:applicable|needed|required|planned|specified|available|provided|included)|
    no (?:breakfast|lunch|dinner|meals?|attractions?|accommodations?|transport(?:ation)?|travel|
    stay)|on the (?:road|way|go|flight|plane)|in[- ]flight|in transit|en route|rest|leisure|
    relax(?:ation)?|free (?:time|day|exploration|morning|afternoon|evening))\b(?!\s+(?-i:[A-Z])|
    \s*[&'])""")
SAID = re.compile(r"[a-z' -]{0,60}\b(?:hotel|accommodation|airport|route|packed|included|choice|"
                  r"own|home|decided|restaurants?|snacks?|picnic|day|area)\b[a-z' -]{0,60}")
MONEY = pattern(r"""(?:(?:approx\w*\.?|about|around|estimated(?: cost)?:?|avg\.?|average)\s*)?
    ~?\$\s?[\d,.]+|free\W*$""")
ATTRIBUTE = pattern(r"""(?:depart(?:ure|s|ing)?|arriv(?:al|es|ing)|duration|distance|costs?|price|
    fare|route|from|to|airline|flight (?:number|no\.?))(?: (?:time|city|date))?\s*:""")
NOTE = pattern(r"""\(?(?:\w+ ){0,2}(?:notes?|reminders?|costs?|(?:sub-?)?totals?|budget|
    price|address|phone|website|contact|rating|cuisines?|entry|admission|fees?|hours|opening|
    check-?out|room type|house rules?|minimum nights|max(?:imum)? occupancy|review|tips?|reason|
    remaining|description|expenses?|date)\b[^:]{0,30}:""")
SECTION = pattern(r"""(?!visit |explore |(?:breakfast|lunch|dinner) at )(?:\w+ ){0,3}(?:costs?|
    budget|expenses?|expenditure|summary|breakdown|notes?|tips?|highlights?|
    totals?|overview|reminders?|recommendations?|considerations?|constraints?|information|
    requirements?)\b[^:.]{0,40}:?$|why (?:this|it)\b|
    (?:this|the) (?:plan|itinerary|trip|total|remaining|above|estimated)\b|
    (?:total|estimated|remaining|overall)\b|(?:important |key )?notes?:|please note|note that|
    in (?:total|summary)\b|unfortunately|i hope|safe travels|let me know|feel free|
    enjoy your (?:\w+ )?(?:trip|stay|travels?|visit|vacation|journey|time)""")
SAME = pattern(r"""(?:(?:stay|return|back|overnight|at|to|in|the) ){0,6}
    (?:same\b|as (?:above|before|day)|(?:previous|your|our|the) (?:hotel|accommodation)\b)""")
FOR_NIGHTS = pattern(r"""(?:entire|whole) (?:stay|trip|visit|duration)|throughout|
    (?:all|both|[2-9]|two|three|four) nights(?! min)""")

# rides and ways
MODES = {"flight": "Flight", "taxi": "Taxi", "driving": "Self-driving"}
MODE = pattern(r"""(?<![\w-])(?<!no )(?<!not )(?<!without )(?:(?P<flight>flights?\b|fly|airline|
    (?:air)?plane\b)|(?P<taxi>(?:taxi|cab|uber|lyft)\b)|
    (?P<driving>self-?\s?driv\w*|driv\w+\b(?!\s(?:time|dist|dur))|
    (?:(?:rental|rented|hire) )?cars?\b|rental\b))""")
OTHER_MODE = pattern(r"\b(?:train|bus|ferry|walk(?:ing)?|boat|shuttle)\b")
FLIGHT_NUMBER = pattern(r"""\b((?-i:F)\d{3,9})\b|
    \bflight\s*(?:number|no\.?|#)?:?\s*\[?((?-i:[A-Z]){1,3}\s?\d{2,7})\b""")
AT_TIME = pattern(r"(?:\b(arriv|land)\w*\D{0,24})?\b(\d{1,2}:\d\d\b(?:\s*[ap]\.?m\b)?)")
DETAILS = {
    "duration": pattern(r"""\b((?:\d days?,? )?\d{1,2}(?:\.\d)?\s*(?:hours?|hrs?|h)(?![a-z])
        (?:,? and)?\s*(?:\d{1,2}\s*(?:min\w*|m)\b)?|\d{1,3}\s*min\w*)"""),
    "distance": pattern(r"\b(\d[\d,]{0,8}(?:\.\d+)?\s*(?:km|kilometers|miles|mi)\b)"),
    "cost": pattern(r"(?:\$\s?|cost:?\s*(?:(?:of|is|about) )?~?)(\d[\d,]{0,8}(?:\.\d+)?)")}
WAY = pattern(r"\bfrom:?\s+(\S[^|;]{0,60}?),?\s*(?:\bto\b|→|->):?\s+(\S[^|;]{0,60})")
BY = pattern(r"(?:\s(?:by|via|in|using)\s(?:an?\s|your\s)?(?:[\w-]+\s)?|\()$")  # "... by car"
GUESS = pattern(r"\((?:[^()]{0,20}\b)?(?:assum|similar|based on|note|no )[^()]{0,200}\)")
TO = pattern(r"\b(?:to|for|into|in)\s+$")
ARROW = re.compile(r"\s*(?:to|[→➔➡➜➝⇒⟶»✈🛫🚗🚕🚙]\ufe0f?|->|=>|–|—|-|>)\s*")
MOVE = pattern(r"""travel|depart|arriv|fl(?:y|ight)|driv|head|return|transfer|journey|welcome|taxi|
    self|road|move|relocat|explor|back|trip|by |(?:rental )?car\b|uber|lyft|cab\b|train|bus\b|
    plane|ferry|shuttle""")
NO_CITY_TITLE = pattern(r"""\b(?:day|\w{3,6}day\b|explor|adventure|sight|cultur|free|relax|arriv|
    depart|final|tour|museum|morning|local|discover|histor|fun|arts?\b|more|travel|return|home|rest|
    leisure|trip|nature|downtown|city|highlight|experience|delight|itinerary)""")

# where names and cities end
CUISINE = r"""(?:american|italian|mexican|indian|chinese|french|mediterranean|seafood|pizza|
    fast food|desserts?|tea|cafe|bbq|bakery|korean|japanese|thai)\b"""
DETAIL = r"""(?:average|avg|costs?|prices?|cuisines?|address|room type|rating|contact|phone|website|
    \d nights?|minimum|max\w*|review|house rules?|free|(?:private|shared|entire) (?:room|home)|
    per )\b"""
STOP = r"(?<!\b(?-i:[A-Z][a-z]))(?<!\b(?-i:[A-Z]))\."  # "Sr." and the like end no name
NUMERAL = r"(?-i:II|III|IV)\b"  # "Park! II" and "Park (West) II" are names
BEGINS = rf"(?=\s+[\"']?(?-i:[A-Z\d]))(?!\s+{NUMERAL})"
NAME_END = pattern(rf"""\s*(?:{EMOJI}+\s*)?(?:$|[,;|)\]\"]|[.!?](?:\s|$)|[(\[]|:(?:\s|$)|
    \s[-–—]+\s|\s[&/+•]\s|\s\d[.)]\s|\s(?:at|by)\s\d|
    \s(?:or|and|for|in|before|after|then|around|where|which|followed|tonight|again|until)\b)""")
# after a known name: "- Rooftop Annex", ": the Secret Cellar", "and Dragon Palace", "in the Mill"
GOES_ON = pattern(rf"""(?:\s[-–—]|:|\sand|\s&|\sin(?=\sthe\s(?-i:[A-Z])))\s
    (?!{CUISINE}|{DETAIL}|(?:must|highly|great|popular|famous|iconic|local|budget|check|visit|explore|enjoy|lunch|dinner|breakfast|brunch)\b)
    ((?!nights?\b|days?\b)(?:the\s)?(?-i:[A-Z])[\w.'’-]*(?:\s(?:(?-i:[A-Z\d])[\w.'’-]*|
    &|and|of|the|at|in|de|la)){{0,6}})\s*(?:$|[,;|:(\[)$\"]|[.!?](?:\s|$)|\s[-–—])""")
CITY_END = pattern(r"""\s*(?:[,;|(\[→:]|\s[-–—]|\.(?:\s|$)|[\])'"!?]|
    \s+(?:International |Intl )?Airport|$|
    \s(?:on|at|by|via|for|with|using|in|(?:depart|arriv|land|leav)\w*|and|then|duration|flight|
    back)\b)""")
ABOUT = pattern(rf"[,.]\s*{DETAIL}|\s*\b{DETAIL}\s*[:$~]")
WRITTEN_END = pattern(rf"""{ABOUT.pattern}|\s*(?:[|;→\[]|,?\s*~?\$|:?\s*$)|
    {STOP}(?:{BEGINS}|(?=\s*$))|
    (?::|\s[-–—])\s+(?=~?\$|[\d.,]+\s*(?:/|per\b|nights?\b|stars?\b|usd\b)|
    {DETAIL}|{CUISINE}|(?!the\b)(?-i:[a-z]))|
    \s*\((?=[^)]{{0,80}}(?:[$\d:,]|{CUISINE}|\b(?:rat|cost|per\b|avg|nights?\b))|
    (?:an?|your|our|great|perfect|popular|famous|must)\b)(?![^)]{{0,80}}\)\s{NUMERAL})|
    \s(?:for|at|around)\s+(?=~?[$\d]|breakfast|brunch|lunch|dinner|noon|midnight|
    (?:the|one|two|three) nights?\b|(?:an?|some|your|our)\s[\w ]{{0,20}}
    (?:meal|dinner|lunch|breakfast|brunch|night|stay|stroll|visit|bite|drink))|
    \s(?:before|after|followed|where|which|then|and then)\s+(?=(?-i:[a-z\d]))|\s*⭐|
    \sand\s(?=(?-i:[a-z]+)\s(?:the|an?|some|its|your)\b)|\sin the (?:morning|afternoon|evening)|
    \sagain(?=\s*(?:$|[,;.]))""")
ADDRESS = re.compile(r",\s*\d[^;|]{3,90}?\b[A-Z]{2}\s\d{5}\b(?:-\d{4})?(?:,\s*USA)?")
REMARK = re.compile(r"\s+[-–—]\s|:\s")
BRACKETS = re.compile(r"\s*\((?:[^()]|\([^()]{0,99}\)){0,200}\)")
CITY_LEAD = re.compile(r"\"?\s*,\s*|\s*\(|\s+in\s+|\s+[-–—]\s+")
CITY_TAIL = r"\s*\([^()]{0,40}\)|,\s*[A-Z]{2}\b(?:\s+\d{5})?|\)"  # ", UT 84532"
# at the end; museums and parks are no cities
LAST_CITY = pattern(rf""",\s*(?![^,;]{{0,40}}(?:museum|zoo|garden|cent(?:er|re)\b|gallery|monument|
    memorial|theat|aquarium|tour|trail|mall|market|bridge|\bpark\s*(?:$|[;(.])|church|historic|
    entire home|(?:private|shared) room)|{CUISINE})
    ((?-i:[A-Z])[\w.'-]*(?: (?:(?-i:[A-Z])|of\b|d['e]|la\b)[\w.'-]*){{0,3}})\s*
    (?:\([^()]{{0,60}}\)\s*)?\.?\s*(?:$|(?=;))""")
SENTENCE = pattern(rf"(?:{STOP}|[!?]){BEGINS}|{STOP}(?=\s*$)")
STEP = pattern(rf"{SENTENCE.pattern}|;\s|,?\s(?:(?:and )?then|before)\s(?:head(?:ing)? to\s)?")

# the lines of a text
NAME_KEY = pattern(r"(?:(?:restaurant|venue|place|hotel|property|attraction)(?: name)?|name)$")
BULLET = re.compile(r"(?:[-+•·●▪‣◦–—>#]++\s+|[•·●▪‣◦–—]++|\d{1,2}[.)]\s+|"
                    r"\[[ xX]?\]\s+|[^\w\s\[\]({\"'$#@&!?.,:;/\\|<>=+~^%-]\s*)*")
NEW_DAY = pattern(rf"(?<=[.!?;])\ +(?={DAY.pattern})")
CELL = re.compile(r"\s{0,99}<(/?)t[dh]\b[^<>]{0,200}>\s{0,99}", re.I)
ROW = re.compile(r"(?m)^[ ]{0,99}\|.*")
MARKUP = pattern(r"""</?(?:(b|i|strong|em|span|a)|
    br|p|li|ul|ol|div|h\d|tr|table|thead|tbody|section)\b[^<>]{0,200}>""")
RUN_IN = re.compile(r"\*\*(\w[\w -]{2,18})\.\*\*(?=\s)")  # "**Lunch.** X"
EMPHASIS = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")  # "__Lunch:__ X"
LINK = re.compile(r"\]\((?:https?:|www)[^()\s]{0,300}\)")
