"""Tables as text: for a terminal and as Markdown, from the same cells. [(title, header, lines, notes under it)]."""


def number(value, form="{:.2f}"):
    return "–" if value is None else form.format(value)


def aligned(line, widths, leading=3):
    """One line of a table: the first cells to the left, figures to the right."""
    cells = [cell.ljust(width) if at < leading else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths))]
    return "  ".join(cells).rstrip()


def text(made):
    parts = []
    for title, header, lines, under in made:
        widths = [max(len(line[at]) for line in [header, *lines]) for at in range(len(header))]
        parts.append("\n".join([title, aligned(header, widths), *(aligned(line, widths) for line in lines), *under]))
    return "\n\n".join(parts)


def markdown(heading, facts, made, said):
    """A page: `facts` are its first bullets, `said` the notes at its end."""
    parts = ["# " + heading, "\n".join(f"- {line}" for line in facts)]
    for title, header, lines, under in made:
        rule = ["---"] * 3 + ["---:"] * (len(header) - 3)
        parts.append(f"## {title}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines]))
        parts.extend(under)
    if said:
        parts.append("## Notes\n\n" + "\n".join(f"- {line}" for line in said))
    return "\n\n".join(parts) + "\n"
