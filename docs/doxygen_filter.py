"""Prints a public header with its ordinary comments marked as documentation, which is how Doxygen asks for them."""

import re
import sys
from pathlib import Path


def marked(comment: re.Match[str]) -> str:
    """Return a C comment as lines of documentation; what is indented further is a table, so code to Markdown."""
    lines = [re.sub(r"^ {3}", "", line) for line in comment[1].strip().split("\n")]
    return "\n".join("/// " + re.sub(r"^(?= {2})", "  ", line) for line in lines)


text = Path(sys.argv[1]).read_text()
text = re.sub(r"^/\*(.*?)\*/$", marked, text, flags=re.MULTILINE | re.DOTALL)
text = re.sub(r"^( *)//(?=\s)", r"\1///", text, flags=re.MULTILINE)
text = re.sub(r"(?<=\S)  +// ", "  ///< ", text)
# Markdown wants an empty line before code, and takes a number and a full stop at the start of a line for a list.
text = re.sub(r"^( *)(///(?! {4})(?=.*\S).*)\n(?= */// {5})", r"\1\2\n\1///\n", text, flags=re.MULTILINE)
text = re.sub(r"^( */// \d+)\.", r"\1\\.", text, flags=re.MULTILINE)
# The comment before everything else is about the file.
text = re.sub(r"\A((?:#.*\n)+\n)///", r"\1/// @file\n///", text)
sys.stdout.write(text)
