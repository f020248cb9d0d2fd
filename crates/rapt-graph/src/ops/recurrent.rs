//! Recurrent layers: LSTM (also with projections), GRU, and the plain ones of tanh and relu; and one step of each.
//!
//! ```text
//! LSTM:  i, f, g, o = W x + b + V h + d;   c' = σ(f)·c + σ(i)·tanh(g);   h' = σ(o)·tanh(c'), then P h' where there is a projection
//! GRU:   r, z = σ(W x + b + V h + d);      n = tanh(W x + b + r·(V h + d));   h' = (1 − z)·n + z·h
//! plain: h' = tanh(W x + b + V h + d), or relu
//! ```
//!
//! Everything is computed in f64 and rounded once, at the end. Sequences lie `[steps, batch, features]`, or batch first: the result then
//! is the exchanged view of that.
//!
//! Deliberately absent: dropout in training, and packed sequences, whose lengths are values that no export can state.

use rapt_core::float64::{exp, tanh};

use super::linear::dot;
use super::shape::{bounded, count, fresh, misfit, need_float, need_same, refuse};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A recurrent layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrent {
    /// What a step computes.
    cell: Cell,
    /// The sequences; of one step `[batch, features]`.
    input: ValueId,
    /// The first hidden states, and of an LSTM the first cells.
    hidden: Vec<ValueId>,
    /// The weights of each layer and direction, in ATen's order.
    params: Vec<ValueId>,
    /// Whether there are biases among them.
    biases: bool,
    /// The layers.
    layers: usize,
    /// Whether a second direction starts at the end.
    both: bool,
    /// How the input lies.
    order: Order,
}

/// A step's formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Lstm,
    Gru,
    Tanh,
    Relu,
}

/// How the input lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// `[steps, batch, features]`.
    StepsFirst,
    /// `[batch, steps, features]`.
    BatchFirst,
    /// `[batch, features]`: one step.
    OneStep,
}

/// A matrix of f64, row-major.
struct Matrix {
    columns: usize,
    data: Vec<f64>,
}

/// The weights of a layer and direction.
struct Weights {
    of_input: Matrix,
    of_hidden: Matrix,
    biases: Option<[Vec<f64>; 2]>,
    projection: Option<Matrix>,
}

/// The state of one sequence: what is handed on, and the cell of an LSTM.
struct State {
    h: Vec<f64>,
    c: Vec<f64>,
}

struct Sizes {
    steps: usize,
    batch: usize,
    /// The features that a layer hands on, and those of its cell.
    out: usize,
    cell: usize,
}

impl Recurrent {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Recurrent, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "lstm.input" => layers(args, Cell::Lstm),
            "gru.input" => layers(args, Cell::Gru),
            "rnn_tanh.input" => layers(args, Cell::Tanh),
            "rnn_relu.input" => layers(args, Cell::Relu),
            "lstm_cell.default" => step(args, Cell::Lstm),
            "gru_cell.default" => step(args, Cell::Gru),
            "rnn_tanh_cell.default" => step(args, Cell::Tanh),
            "rnn_relu_cell.default" => step(args, Cell::Relu),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let input = shapes.meta(self.input)?;
        need_float("a recurrent layer", input.dtype)?;
        let sizes = self.sizes(shapes)?;
        let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let (steps, batch) = (signed(sizes.steps), signed(sizes.batch));
        let states = |features: usize| match self.order {
            Order::OneStep => fresh(input.dtype, &[batch, signed(features)]),
            _ => fresh(input.dtype, &[signed(self.layers * self.directions()), batch, signed(features)]),
        };
        let mut outs = Vec::new();
        if self.order != Order::OneStep {
            let features = signed(sizes.out * self.directions());
            let shape = [steps, batch, features];
            bounded(&shape)?;
            let mut meta = Meta::contiguous(input.dtype, &shape);
            if self.order == Order::BatchFirst {
                meta.shape.swap(0, 1);
                meta.strides.swap(0, 1);
            }
            outs.push(Out::Fresh(meta));
        }
        let state = states(sizes.out)?;
        if let (Order::OneStep, Cell::Gru, Out::Fresh(mut meta)) = (self.order, self.cell, state.clone()) {
            // PyTorch's step begins with the state, and its result lies as that does.
            meta.strides = strides::of_pointwise(&meta.shape, &[shapes.meta(self.hidden[0])?, &meta]);
            return Ok(vec![Out::Fresh(meta)]);
        }
        outs.push(state);
        if self.cell == Cell::Lstm {
            outs.push(states(sizes.cell)?);
        }
        Ok(outs)
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let sizes = self.sizes(eval)?;
        let input = eval.tensor(self.input)?;
        let mut meta = input.meta.clone();
        if self.order == Order::BatchFirst {
            meta.shape.swap(0, 1);
            meta.strides.swap(0, 1);
        }
        // [steps][batch] of features.
        let features = count(meta.shape.last().copied().unwrap_or(0));
        let mut x: Vec<Vec<f64>> = rows(&input.view(meta).floats(), features, sizes.steps * sizes.batch);
        let first: Vec<Vec<f64>> =
            self.hidden.iter().map(|&id| Ok(eval.tensor(id)?.floats())).collect::<Result<_, OpError>>()?;
        let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
        for layer in 0..self.layers {
            let mut y: Vec<Vec<f64>> = vec![Vec::new(); x.len()];
            for direction in 0..self.directions() {
                let n = layer * self.directions() + direction;
                let weights = self.weights(eval, n)?;
                for b in 0..sizes.batch {
                    let of = |states: &[f64], size: usize| states[(n * sizes.batch + b) * size..][..size].to_vec();
                    let c = first.get(1).map(|c| of(c, sizes.cell)).unwrap_or_default();
                    let mut state = State { h: of(&first[0], sizes.out), c };
                    for step in 0..sizes.steps {
                        let at = if direction == 0 { step } else { sizes.steps - 1 - step } * sizes.batch + b;
                        state = self.step(&weights, &x[at], &state);
                        y[at].extend(&state.h);
                    }
                    last_h.extend(state.h);
                    last_c.extend(state.c);
                }
            }
            x = y;
        }
        let results = match self.order {
            Order::OneStep => vec![last_h, last_c],
            Order::StepsFirst => vec![x.concat(), last_h, last_c],
            Order::BatchFirst => {
                let by_batch = (0..sizes.batch).flat_map(|b| x.iter().skip(b).step_by(sizes.batch.max(1)));
                vec![by_batch.flatten().copied().collect(), last_h, last_c]
            }
        };
        for (out, values) in outs.iter().zip(results) {
            out.write_floats(eval.precision(), values);
        }
        Ok(())
    }

    fn step(&self, weights: &Weights, x: &[f64], state: &State) -> State {
        let bias = |which: usize, n: usize| weights.biases.as_ref().map_or(0.0, |biases| biases[which][n]);
        let of_input = |n: usize| weights.of_input.row(n, x) + bias(0, n);
        let of_hidden = |n: usize| weights.of_hidden.row(n, &state.h) + bias(1, n);
        let gate = |n: usize| of_input(n) + of_hidden(n);
        let sigmoid = |x: f64| 1.0 / (1.0 + exp(-x));
        let size = weights.of_hidden.rows() / self.cell.gates();
        match self.cell {
            Cell::Tanh => State { h: (0..size).map(|n| tanh(gate(n))).collect(), c: Vec::new() },
            // Not `max`, which drops NaN.
            Cell::Relu => {
                let relu = |x: f64| if x < 0.0 { 0.0 } else { x };
                State { h: (0..size).map(|n| relu(gate(n))).collect(), c: Vec::new() }
            }
            Cell::Gru => {
                let one = |n: usize| {
                    let (reset, keep) = (sigmoid(gate(n)), sigmoid(gate(size + n)));
                    let new = tanh(of_input(2 * size + n) + reset * of_hidden(2 * size + n));
                    (1.0 - keep) * new + keep * state.h[n]
                };
                State { h: (0..size).map(one).collect(), c: Vec::new() }
            }
            Cell::Lstm => {
                let cell =
                    |n: usize| sigmoid(gate(size + n)) * state.c[n] + sigmoid(gate(n)) * tanh(gate(2 * size + n));
                let c: Vec<f64> = (0..size).map(cell).collect();
                let h: Vec<f64> = (0..size).map(|n| sigmoid(gate(3 * size + n)) * tanh(c[n])).collect();
                let h = match &weights.projection {
                    Some(projection) => (0..projection.rows()).map(|n| projection.row(n, &h)).collect(),
                    None => h,
                };
                State { h, c }
            }
        }
    }

    fn directions(&self) -> usize {
        if self.both { 2 } else { 1 }
    }

    /// The number of weights of a layer and direction.
    fn weights_each(&self) -> Result<usize, OpError> {
        let all = self.layers * self.directions();
        let least = if self.biases { 4 } else { 2 };
        match self.params.len() {
            n if n == all * least => Ok(least),
            n if n == all * (least + 1) && self.cell == Cell::Lstm => Ok(least + 1),
            n => misfit(format!("{n} weights of {} layers in {} directions", self.layers, self.directions())),
        }
    }

    fn weights(&self, eval: &dyn Eval, n: usize) -> Result<Weights, OpError> {
        let each = self.weights_each()?;
        let own = &self.params[n * each..][..each];
        let matrix = |id: ValueId| {
            let tensor = eval.tensor(id)?;
            let columns = count(tensor.meta.shape.last().copied().unwrap_or(0));
            Ok::<_, OpError>(Matrix { columns, data: tensor.floats() })
        };
        let vector = |id: ValueId| Ok::<_, OpError>(eval.tensor(id)?.floats());
        let biases = if self.biases { Some([vector(own[2])?, vector(own[3])?]) } else { None };
        let projection = if each % 2 == 1 { Some(matrix(own[each - 1])?) } else { None };
        Ok(Weights { of_input: matrix(own[0])?, of_hidden: matrix(own[1])?, biases, projection })
    }

    /// The sizes, and that everything fits them.
    fn sizes(&self, shapes: &dyn Shapes) -> Result<Sizes, OpError> {
        let input = shapes.meta(self.input)?;
        let (steps, batch, mut features) = match (self.order, &input.shape[..]) {
            (Order::StepsFirst, &[t, b, f]) | (Order::BatchFirst, &[b, t, f]) => (t, b, f),
            (Order::OneStep, &[b, f]) => (1, b, f),
            (_, shape) => return misfit(format!("sequences of shape {shape:?}")),
        };
        if steps == 0 {
            return misfit("sequences of no steps");
        }
        let each = self.weights_each()?;
        let states = if self.cell == Cell::Lstm { 2 } else { 1 };
        if self.hidden.len() != states || self.params.is_empty() {
            return misfit(format!("{} states, and {states} are expected", self.hidden.len()));
        }
        let last = |id: ValueId| Ok::<_, OpError>(shapes.meta(id)?.shape.last().copied().unwrap_or(0));
        let out = last(self.hidden[0])?;
        let cell = last(self.hidden[states - 1])?;
        if each % 2 == 0 && out != cell {
            return misfit(format!("hidden states of {out} and cells of {cell} features"));
        }
        let gates = i64::try_from(self.cell.gates()).unwrap_or(1);
        let lead = [i64::try_from(self.layers * self.directions()).unwrap_or(0), batch];
        let fits = |id: ValueId, expected: &[i64]| {
            let meta = shapes.meta(id)?;
            need_same(input.dtype, meta.dtype)?;
            if meta.shape == expected {
                Ok(())
            } else {
                misfit(format!("{:?} where {expected:?} is expected", meta.shape))
            }
        };
        for (&id, size) in self.hidden.iter().zip([out, cell]) {
            let shape = [lead[0], lead[1], size];
            fits(id, if self.order == Order::OneStep { &shape[1..] } else { &shape })?;
        }
        for (n, own) in self.params.chunks(each).enumerate() {
            fits(own[0], &[gates * cell, features])?;
            fits(own[1], &[gates * cell, out])?;
            if self.biases {
                fits(own[2], &[gates * cell])?;
                fits(own[3], &[gates * cell])?;
            }
            if each % 2 == 1 {
                fits(own[each - 1], &[out, cell])?;
            }
            if (n + 1) % self.directions() == 0 {
                features = out * i64::try_from(self.directions()).unwrap_or(1);
            }
        }
        Ok(Sizes { steps: count(steps), batch: count(batch), out: count(out), cell: count(cell) })
    }
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Lstm => 4,
            Cell::Gru => 3,
            Cell::Tanh | Cell::Relu => 1,
        }
    }
}

impl Matrix {
    fn rows(&self) -> usize {
        self.data.len() / self.columns.max(1)
    }

    /// The product of a row and a vector.
    fn row(&self, n: usize, x: &[f64]) -> f64 {
        dot(&self.data[n * self.columns..][..self.columns], x)
    }
}

/// Rows of `size` elements.
fn rows(x: &[f64], size: usize, number: usize) -> Vec<Vec<f64>> {
    (0..number).map(|n| x[n * size..][..size].to_vec()).collect()
}

fn layers(args: &Args<'_>, cell: Cell) -> Result<Recurrent, OpError> {
    if args.bool_or("train", false)? && args.opt_float("dropout")?.unwrap_or(0.0) != 0.0 {
        return refuse("train", "true", "dropout in training is random: export the model in eval mode");
    }
    args.opt_float("dropout")?;
    let hidden = if cell == Cell::Lstm { args.tensors("hx")? } else { vec![args.tensor("hx")?] };
    let layers = args.known_int("num_layers")?;
    Ok(Recurrent {
        cell,
        input: args.tensor("input")?,
        hidden,
        params: args.tensors("params")?,
        biases: args.bool_or("has_biases", true)?,
        layers: count(layers),
        both: args.bool_or("bidirectional", false)?,
        order: if args.bool_or("batch_first", false)? { Order::BatchFirst } else { Order::StepsFirst },
    })
}

fn step(args: &Args<'_>, cell: Cell) -> Result<Recurrent, OpError> {
    let hidden = if cell == Cell::Lstm { args.tensors("hx")? } else { vec![args.tensor("hx")?] };
    let mut params = vec![args.tensor("w_ih")?, args.tensor("w_hh")?];
    let biases: Vec<ValueId> = [args.opt_tensor("b_ih")?, args.opt_tensor("b_hh")?].into_iter().flatten().collect();
    let has_biases = biases.len() == 2;
    if biases.len() == 1 {
        return misfit("one bias without the other");
    }
    params.extend(biases);
    let input = args.tensor("input")?;
    Ok(Recurrent { cell, input, hidden, params, biases: has_biases, layers: 1, both: false, order: Order::OneStep })
}
