//! `rapt model show --html`: the graph as one HTML file that needs nothing else.
//!
//! ```text
//!  lanes      rows, in the order of calls
//!  │ ┌────────  x                                        → float32 [s0, 4]
//!  │ └────────  0 aten.linear.default  linear  (x, …)    → float32 [s0, 3]
//! ```
//! A value is an edge: a line in a lane of its own from the row that makes it to the last row that takes it. Lanes are given
//! out again when their value is done, so that a graph of thousands of nodes stays narrow. Weights are named where they are
//! used and have no lanes. All text of the archive is escaped. Deliberately absent: any address of a network.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt::{self, Write};

use rapt::pt2::{Argument, Expr, InputSpec, Node, OutputSpec, Program, SymInt, TensorMeta};

/// Pixels of a row, of a lane, and of a letter.
const ROW: usize = 22;
const LANE: usize = 9;
const LETTER: usize = 8;
/// Arguments of a row longer than this are cut: the name is what one looks for.
const MOST_LETTERS: usize = 160;

/// A row of the view.
struct Row {
    number: String,
    op: String,
    name: String,
    arguments: String,
    form: String,
    is_missing: bool,
}

/// A value: the row that makes it, those that take it, and what it is.
struct Edge {
    from: usize,
    to: Vec<usize>,
    text: String,
    lane: usize,
}

/// Text where markup would mean something.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // No control letter is text, and none that turns the direction of what follows.
                letter if letter.is_control() || ('\u{202a}'..='\u{202e}').contains(&letter) => {
                    f.write_char('\u{fffd}')?;
                }
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

/// `aten.add.Tensor` of the name that an archive has.
fn short(target: &str) -> &str {
    target.split_once(".ops.").map_or(target, |(_, name)| name)
}

fn form(meta: &TensorMeta) -> String {
    let sizes: Vec<String> = meta.sizes.iter().map(Expr::to_string).collect();
    format!("{} [{}]", meta.dtype, sizes.join(", "))
}

/// The values that an argument names.
fn names(argument: &Argument) -> Vec<&str> {
    match argument {
        Argument::Tensor(name) | Argument::SymBool(name) | Argument::SymFloat(name) => vec![name],
        Argument::Tensors(names) => names.iter().map(String::as_str).collect(),
        Argument::OptionalTensors(names) => names.iter().flatten().map(String::as_str).collect(),
        Argument::SymInt(SymInt::Name(name)) => vec![name],
        Argument::SymInts(sizes) => sizes.iter().filter_map(named).collect(),
        _ => Vec::new(),
    }
}

fn named(size: &SymInt) -> Option<&str> {
    if let SymInt::Name(name) = size { Some(name) } else { None }
}

fn list<T>(items: &[T], text: impl Fn(&T) -> String) -> String {
    format!("[{}]", items.iter().map(text).collect::<Vec<_>>().join(", "))
}

/// An argument as one reads it in a call.
fn text(argument: &Argument) -> String {
    let size = |size: &SymInt| match size {
        SymInt::Int(n) => n.to_string(),
        SymInt::Name(name) => name.clone(),
    };
    match argument {
        Argument::None => "None".into(),
        Argument::Tensor(name) | Argument::SymBool(name) | Argument::SymFloat(name) => name.clone(),
        Argument::Tensors(names) => list(names, String::clone),
        Argument::OptionalTensors(names) => list(names, |name| name.clone().unwrap_or_else(|| "None".into())),
        Argument::Int(n) => n.to_string(),
        Argument::Ints(numbers) => list(numbers, i64::to_string),
        Argument::Float(x) => format!("{x:?}"),
        Argument::Floats(numbers) => list(numbers, |x| format!("{x:?}")),
        Argument::Bool(b) => b.to_string(),
        Argument::Bools(bools) => list(bools, bool::to_string),
        Argument::String(text) => format!("{text:?}"),
        Argument::Strings(texts) => list(texts, |text| format!("{text:?}")),
        Argument::SymInt(one) => size(one),
        Argument::SymInts(sizes) => list(sizes, size),
        Argument::Dtype(dtype) => dtype.to_string(),
        Argument::MemoryFormat(format) => format!("{format:?}"),
        Argument::Layout(code) => format!("layout {code}"),
        Argument::Device(device) => device.kind.clone(),
        Argument::Other(kind) => format!("({kind})"),
    }
}

/// A graph as rows and edges.
struct View<'a> {
    program: &'a Program,
    /// What the archive holds: its name in the model, by its name in the graph.
    held: BTreeMap<&'a str, &'a str>,
    missing: BTreeSet<&'a str>,
    rows: Vec<Row>,
    edges: BTreeMap<&'a str, Edge>,
}

impl<'a> View<'a> {
    fn new(program: &'a Program, missing: BTreeSet<&'a str>) -> Self {
        let state = |input: &'a InputSpec| match input {
            InputSpec::Parameter { value, name }
            | InputSpec::Buffer { value, name, .. }
            | InputSpec::Constant { value, name } => Some((value.as_str(), name.as_str())),
            InputSpec::User(_) | InputSpec::Fixed { .. } => None,
        };
        let held = program.signature.inputs.iter().filter_map(state).collect();
        let mut view = View { program, held, missing, rows: Vec::new(), edges: BTreeMap::new() };
        for input in &program.signature.inputs {
            view.input(input);
        }
        for (number, node) in program.graph.nodes.iter().enumerate() {
            view.node(number, node);
        }
        for (spec, output) in program.signature.outputs.iter().zip(&program.graph.outputs) {
            view.output(spec, output);
        }
        view.give_lanes();
        view
    }

    fn push(&mut self, number: &str, op: &str, name: &str, takes: &[&'a str]) -> &mut Row {
        let place = self.rows.len();
        for name in takes {
            if let Some(edge) = self.edges.get_mut(name) {
                edge.to.push(place);
            }
        }
        let (number, op, name) = (number.to_owned(), op.to_owned(), name.to_owned());
        let (arguments, form) = (String::new(), String::new());
        self.rows.push(Row { number, op, name, arguments, form, is_missing: false });
        &mut self.rows[place]
    }

    /// Begins the edges of what the last row makes, and gives their forms.
    fn make(&mut self, values: &[&'a str]) -> String {
        let forms = values.iter().map(|name| {
            let graph = &self.program.graph;
            let form = graph.tensors.get(*name).map(form).or_else(|| graph.sym_ints.get(*name).map(Expr::to_string));
            let form = form.unwrap_or_else(|| "a number".into());
            let edge = Edge { from: self.rows.len() - 1, to: Vec::new(), text: format!("{name}: {form}"), lane: 0 };
            self.edges.insert(name, edge);
            form
        });
        let forms: Vec<String> = forms.collect();
        forms.join("; ")
    }

    fn input(&mut self, input: &'a InputSpec) {
        match input {
            InputSpec::User(argument) => {
                let values = names(argument);
                self.push("in", "input", &text(argument), &[]);
                let forms = self.make(&values);
                self.rows.last_mut().expect("a row was pushed").form = forms;
            }
            InputSpec::Fixed { name, value } => self.push("in", "fixed", name, &[]).form = text(value),
            InputSpec::Parameter { .. } | InputSpec::Buffer { .. } | InputSpec::Constant { .. } => {}
        }
    }

    fn node(&mut self, number: usize, node: &'a Node) {
        let takes: Vec<&str> = node.inputs.iter().flat_map(|input| names(&input.value)).collect();
        let argument = |input: &'a rapt::pt2::NamedArgument| match &input.value {
            Argument::Tensor(name) if self.held.contains_key(name.as_str()) => {
                let form = self.program.graph.tensors.get(name).map(form).unwrap_or_default();
                format!("{} {form}", self.held[name.as_str()])
            }
            Argument::Tensor(_) => text(&input.value),
            other => format!("{}={}", input.name, text(other)),
        };
        let mut arguments = node.inputs.iter().map(argument).collect::<Vec<_>>().join(", ");
        if let Some((end, _)) = arguments.char_indices().nth(MOST_LETTERS) {
            arguments.truncate(end);
            arguments.push('…');
        }
        let is_missing = self.missing.contains(short(&node.target));
        let row = self.push(&number.to_string(), short(&node.target), &node.name, &takes);
        (row.arguments, row.is_missing) = (format!("({arguments})"), is_missing);
        let values: Vec<&str> = node.outputs.iter().flat_map(names).collect();
        let forms = self.make(&values);
        self.rows.last_mut().expect("a row was pushed").form = forms;
    }

    fn output(&mut self, spec: &'a OutputSpec, output: &'a Argument) {
        let (op, name) = match spec {
            OutputSpec::User(argument) => ("output", text(argument)),
            OutputSpec::BufferMutation { name, .. } => ("writes buffer", name.clone()),
            OutputSpec::InputMutation { input, .. } => ("writes input", input.clone()),
        };
        self.push("out", op, &name, &names(output));
    }

    /// Gives each edge a lane: the leftmost that is free, free again after its last row.
    fn give_lanes(&mut self) {
        let mut edges: Vec<&mut Edge> = self.edges.values_mut().filter(|edge| !edge.to.is_empty()).collect();
        edges.sort_by_key(|edge| edge.from);
        let (mut busy, mut free, mut lanes) = (BinaryHeap::new(), BinaryHeap::new(), 0);
        for edge in edges {
            while let Some(&Reverse((end, lane))) = busy.peek() {
                if end >= edge.from {
                    break;
                }
                busy.pop();
                free.push(Reverse(lane));
            }
            edge.lane = free.pop().map_or(lanes, |Reverse(lane): Reverse<usize>| lane);
            lanes = lanes.max(edge.lane + 1);
            busy.push(Reverse((edge.to.iter().copied().max().unwrap_or(edge.from), edge.lane)));
        }
    }

    fn draw(&self) -> String {
        let lanes = self.edges.values().map(|edge| edge.lane + 1).max().unwrap_or(0);
        let left = 24 + lanes * LANE;
        let letters = |row: &Row| {
            [&row.number, &row.op, &row.name, &row.arguments, &row.form].iter().map(|text| text.chars().count()).sum()
        };
        let widest: usize = self.rows.iter().map(letters).max().unwrap_or(0);
        let (width, height) = (left + (widest + 16) * LETTER, (self.rows.len() + 1) * ROW);
        let mut svg = format!(r#"<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">"#);
        for edge in self.edges.values().filter(|edge| !edge.to.is_empty()) {
            svg.push_str(&edge_of(edge, left));
        }
        for (place, row) in self.rows.iter().enumerate() {
            let y = place * ROW;
            let missing = if row.is_missing { " missing" } else { "" };
            svg += &format!(
                r#"<g class="row{missing}" id="r{place}"><rect class="band" x="{left}" y="{y}" width="{}" height="{ROW}" rx="3"/>
<text x="{}" y="{}"><tspan class="number">{:>5}</tspan> <tspan class="op">{}</tspan>  {} <tspan class="arguments">{}</tspan>"#,
                width - left,
                left + 6,
                y + ROW - 7,
                Escaped(&row.number),
                Escaped(&row.op),
                Escaped(&row.name),
                Escaped(&row.arguments),
            );
            if !row.form.is_empty() {
                svg += &format!(r#" <tspan class="form">→ {}</tspan>"#, Escaped(&row.form));
            }
            svg += "</text></g>\n";
        }
        svg + "</svg>"
    }
}

fn edge_of(edge: &Edge, left: usize) -> String {
    let x = 12 + edge.lane * LANE;
    let (start, last) = (edge.from * ROW + ROW / 2 + 4, edge.to.iter().copied().max().unwrap_or(edge.from));
    let mut path = format!("M{left} {start}H{x}V{}", last * ROW + ROW / 2 - 4);
    let mut rows = edge.from.to_string();
    let ends: BTreeSet<usize> = edge.to.iter().copied().collect();
    for end in ends {
        path += &format!("M{x} {}H{left}", end * ROW + ROW / 2 - 4);
        rows += &format!(" {end}");
    }
    format!(r#"<path class="edge" data-rows="{rows}" d="{path}"><title>{}</title></path>"#, Escaped(&edge.text)) + "\n"
}

/// The page of a program. Operators in `missing` are marked.
pub(super) fn page(title: &str, program: &Program, missing: BTreeSet<&str>) -> String {
    let view = View::new(program, missing);
    let (style, script) = (include_str!("view.css"), include_str!("view.js"));
    let title = Escaped(title);
    format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1> <input type="search" placeholder="find a name, an operator, a dtype or a size" aria-label="find"> <output></output>
<div>{} nodes, written by {}. Enter: the next one found. A click shows the edges of a row; an edge says its dtype and its sizes.</div></header>
{}
<script>
{script}</script>
</body>
</html>
"#,
        program.graph.nodes.len(),
        Escaped(&program.torch_version),
        view.draw()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta() -> TensorMeta {
        TensorMeta {
            dtype: rapt::DType::F32,
            sizes: vec![Expr::Symbol("s0".into()), Expr::Int(4)],
            strides: vec![Expr::Int(4), Expr::Int(1)],
            storage_offset: Expr::Int(0),
            device: rapt::pt2::Device { kind: "cpu".into(), index: None },
        }
    }

    /// A chain of nodes, each of which adds the first input to the one before.
    fn chain(nodes: usize, name: impl Fn(usize) -> String) -> Program {
        let mut program = Program {
            torch_version: "2.15".into(),
            schema_version: (8, 20),
            graph: rapt::pt2::Graph::default(),
            signature: rapt::pt2::Signature::default(),
            symbols: Vec::new(),
            guards: Vec::new(),
            call: None,
        };
        let tensor = |n: usize| Argument::Tensor(name(n));
        let input = |n: usize| rapt::pt2::NamedArgument { name: "self".into(), value: tensor(n) };
        program.graph.inputs.push(tensor(0));
        program.signature.inputs.push(InputSpec::User(tensor(0)));
        for n in 1..=nodes {
            program.graph.nodes.push(Node {
                name: name(n),
                target: "torch.ops.aten.add.Tensor".into(),
                inputs: vec![input(n - 1), input(0)],
                outputs: vec![tensor(n)],
            });
        }
        program.graph.tensors = (0..=nodes).map(|n| (name(n), meta())).collect();
        program.graph.outputs.push(tensor(nodes));
        program.signature.outputs.push(OutputSpec::User(tensor(nodes)));
        program
    }

    #[test]
    fn every_node_is_a_row_and_every_value_an_edge_with_its_form() {
        let program = chain(2000, |n| format!("v{n}"));
        let page = page("m.pt2", &program, BTreeSet::new());
        assert_eq!(page.matches("<g class=\"row\"").count(), 2002);
        assert_eq!(page.matches("<path class=\"edge\"").count(), 2001);
        assert!(page.contains("<title>v7: float32 [s0, 4]</title>") && page.contains("→ float32 [s0, 4]"));
        assert!(page.len() < 2_000_000, "{} bytes", page.len());
        let width: usize = page.split_once("<svg width=\"").unwrap().1.split_once('"').unwrap().0.parse().unwrap();
        assert!(width < 1500, "lanes are given out again: {width} pixels");
    }

    #[test]
    fn text_of_the_archive_is_no_markup_and_nothing_is_fetched() {
        let program = chain(2, |n| format!("</script><script>alert('{n}')</script>\u{0}\u{202e}\"&"));
        let page = page("<b>.pt2", &program, ["aten.add.Tensor"].into());
        assert_eq!(page.matches("<script>").count(), 1);
        assert!(!page.contains("alert('") && page.contains("alert(&#39;2&#39;)") && page.contains("&lt;b&gt;.pt2"));
        assert!(!page.contains('\u{0}') && !page.contains('\u{202e}'));
        assert!(!page.contains("://") && !page.contains(" src=") && !page.contains("href"));
        assert_eq!(page.matches("class=\"row missing\"").count(), 2);
    }
}
