"""The diagnostic codes of the plan language, each with its one-line explanation."""

from compiler.diagnostics import declare_codes

CODES = {
    # files
    "E001": "A plan file cannot be read.",
    "E002": "A plan file is not UTF-8 text.",
    "E003": "Plans include each other in a circle, or too deeply.",
    # characters
    "E010": "A character that has no meaning in a plan.",
    "E011": "A string without its closing quote.",
    "E012": "A string with an unknown escape, or in single quotes.",
    "E013": "A malformed or too large number.",
    "E014": "A bracket that is never closed.",
    "E015": "A closing bracket without an opening one.",
    "E016": "Brackets or an expression nested too deeply.",
    # shape of statements
    "E020": "Something else was expected here.",
    "E021": "An unknown statement.",
    "E022": "A reserved word used as a name.",
    "E030": "The same thing is given twice.",
    "E031": "A statement that every plan needs is missing.",
    "E032": "An unknown option.",
    # values
    "E040": "A value of the wrong type.",
    "E041": "A missing unit, or a unit of the wrong kind.",
    "E042": "An unknown unit.",
    "E043": "A number out of range.",
    "E044": "A word that is not one of the choices.",
    "E045": "Arithmetic that has no result.",
    "E046": "A string whose content is malformed.",
    "E047": "An input whose shape or dtype is impossible.",
    # names and --set
    "E050": "An undefined name.",
    "E051": "Names defined in a circle.",
    "E052": "`--set` of something that the plan does not have.",
    "E053": "A malformed `--set`.",
    # meaning
    "E060": "An axis that the mesh does not have.",
    "E061": "An axis used by two strategies that exclude each other.",
    "E062": "A wrong number of axes.",
    "E063": "The cluster and the mesh have different sizes.",
    "E064": "`data` and `pipeline` disagree about micro-batches.",
    "E065": "`zero` over an axis on which nothing is replicated by data.",
    "E066": "An option that needs another one.",
    "E067": "Options that exclude each other.",
    "E068": "A size that no input has.",
    # warnings
    "W001": "A name that nothing uses.",
    "W002": "A mesh axis that no strategy uses.",
    "W003": "A statement or option without effect.",
}

declare_codes(CODES)
