//! `einsum`: sums of products by the names of dimensions.
//!
//! Operands are contracted two at a time, from the left or by `path`, as PyTorch does: each pair's common dimensions that
//! nothing else needs are summed, the others stay. With one operand and nothing to sum the result is a view. Floats are
//! summed in f64, intermediate results are not rounded.
//!
//! The layout follows PyTorch's steps: a contraction is a batched product of `[common, left, summed]` and
//! `[common, summed, right]`, whose result is seen in the output's order; without anything to sum it is an elementwise
//! product.

use rapt_core::DType;

use super::linear::Arithmetic;
use super::shape::{bounded, fresh, misfit, need_number, need_plain, need_same, places, refuse, row_major};
use crate::tensor::is_float;
use crate::{Args, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A sum of products.
#[derive(Clone, Debug, PartialEq)]
pub struct Einsum {
    /// The equation.
    pub equation: Equation,
    /// The operands.
    pub operands: Vec<ValueId>,
    /// The pairs in the order of contraction, or none: from the left.
    pub path: Vec<i64>,
}

/// The dimensions of operands and result by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Equation {
    /// Each operand's dimensions.
    pub inputs: Vec<Vec<Name>>,
    /// The result's dimensions.
    pub output: Vec<Name>,
    /// The equation as it was written.
    pub text: String,
}

/// A name in an equation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// One dimension.
    Letter(char),
    /// The dimensions that have no letter.
    Ellipsis,
}

/// The operands seen in all dimensions of the equation: those of the output first, then those that are summed.
struct Aligned {
    /// How many dimensions the output has.
    kept: usize,
    /// Each operand's sizes, 1 where it lacks the dimension, and its strides.
    operands: Vec<(Vec<i64>, Vec<i64>)>,
}

impl Einsum {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Einsum, OpError>> {
        (target == "torch.ops.aten.einsum.default").then(|| einsum(args))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let metas = self.operands.iter().map(|&id| shapes.meta(id)).collect::<Result<Vec<_>, _>>()?;
        for meta in &metas {
            need_same(metas[0].dtype, meta.dtype)?;
            need_plain("einsum", meta.dtype)?;
        }
        let dtype = metas[0].dtype;
        let aligned = self.align(&metas.iter().map(|m| (&m.shape[..], &m.strides[..])).collect::<Vec<_>>())?;
        let shape = aligned.result_shape();
        bounded(&shape)?;
        if let ([operand], [of]) = (&aligned.operands[..], &self.operands[..]) {
            if operand.0.len() > aligned.kept {
                // A sum of booleans would count them.
                need_number("einsum", dtype)?;
                return Ok(vec![fresh(dtype, &shape)?]);
            }
            let meta = Meta { dtype, shape, strides: operand.1.clone(), offset: metas[0].offset };
            return Ok(vec![Out::View { of: *of, meta }]);
        }
        let (strides, products) = aligned.contract_forms(&self.pairs(aligned.operands.len())?)?;
        if products {
            need_number("einsum", dtype)?;
        }
        Ok(vec![Out::Fresh(Meta { dtype, shape, strides, offset: 0 })])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let tensors = self.operands.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
        let strides: Vec<Vec<i64>> = tensors.iter().map(|t| row_major(&t.meta.shape)).collect();
        let forms: Vec<(&[i64], &[i64])> =
            tensors.iter().zip(&strides).map(|(t, s)| (&t.meta.shape[..], &s[..])).collect();
        let aligned = self.align(&forms)?;
        if aligned.operands.len() == 1 && aligned.operands[0].0.len() == aligned.kept {
            return Ok(());
        }
        let pairs = self.pairs(tensors.len())?;
        if is_float(outs[0].meta.dtype) {
            let data = tensors.iter().map(|t| t.floats()).collect();
            outs[0].write_floats(eval.precision(), aligned.contract(data, &pairs));
        } else {
            let data = tensors.iter().map(|t| t.ints()).collect();
            outs[0].write_ints(aligned.contract(data, &pairs));
        }
        Ok(())
    }

    /// Two operands in all dimensions of the equation, the result's first; one that an operand lacks has size 1 and stride 0. `None`
    /// where there are not two.
    ///
    /// # Errors
    /// [`OpError`] where the operands do not fit the equation.
    pub fn pair(&self, metas: [&Meta; 2]) -> Result<Option<[Meta; 2]>, OpError> {
        if self.operands.len() != 2 {
            return Ok(None);
        }
        let aligned = self.align(&metas.map(|meta| (&meta.shape[..], &meta.strides[..])))?;
        let forms = aligned.operands.into_iter().zip(metas).map(|((shape, mut strides), meta)| {
            strides.iter_mut().zip(&shape).filter(|(_, size)| **size == 1).for_each(|(stride, _)| *stride = 0);
            Meta { shape, strides, ..meta.clone() }
        });
        Ok(<[Meta; 2]>::try_from(forms.collect::<Vec<_>>()).ok())
    }

    /// The places of the two operands of each contraction; its result goes to the front, or by a path to the end.
    fn pairs(&self, operands: usize) -> Result<Vec<(usize, usize)>, OpError> {
        let steps = operands - 1;
        if self.path.is_empty() {
            return Ok(vec![(0, 1); steps]);
        }
        if self.path.len() != 2 * steps {
            return refuse("path", format!("{:?}", self.path), "two numbers for each contraction are expected");
        }
        let pair = |(step, pair): (usize, &[i64])| {
            let left = operands - step;
            let at = |n: i64| usize::try_from(n).ok().filter(|&n| n < left);
            match (at(pair[0]), at(pair[1])) {
                (Some(a), Some(b)) if a != b => Ok((a, b)),
                _ => refuse("path", format!("{:?}", self.path), "it names an operand that is not there"),
            }
        };
        self.path.chunks(2).enumerate().map(pair).collect()
    }

    /// The operands, given by shape and strides, in all dimensions of the equation.
    fn align(&self, operands: &[(&[i64], &[i64])]) -> Result<Aligned, OpError> {
        let text = &self.equation.text;
        if operands.len() != self.equation.inputs.len() || operands.is_empty() {
            return misfit(format!("einsum {text} of {} operands", operands.len()));
        }
        let mut unnamed = 0;
        for ((shape, _), names) in operands.iter().zip(&self.equation.inputs) {
            let letters = names.iter().filter(|&&name| name != Name::Ellipsis).count();
            let ellipsis = names.len() > letters;
            match shape.len().checked_sub(letters) {
                Some(extra) if extra == 0 || ellipsis => unnamed = unnamed.max(extra),
                _ => return misfit(format!("einsum {text} of a tensor of shape {shape:?}")),
            }
        }
        // The order of all dimensions: the output's, then the others by their letters.
        let mut order: Vec<(Name, usize)> = Vec::new();
        let spread = |name: Name| (0..if name == Name::Ellipsis { unnamed } else { 1 }).map(move |i| (name, i));
        order.extend(self.equation.output.iter().flat_map(|&name| spread(name)));
        let kept = order.len();
        if unnamed > 0 && !self.equation.output.contains(&Name::Ellipsis) {
            order.extend(spread(Name::Ellipsis));
        }
        let mut summed: Vec<char> = self
            .equation
            .inputs
            .iter()
            .flatten()
            .filter_map(|&name| if let Name::Letter(c) = name { Some(c) } else { None })
            .filter(|&c| !self.equation.output.contains(&Name::Letter(c)))
            .collect();
        summed.sort_unstable();
        summed.dedup();
        order.extend(summed.into_iter().map(|c| (Name::Letter(c), 0)));
        let mut aligned = Aligned { kept, operands: Vec::new() };
        let mut sizes = vec![1; order.len()];
        for ((shape, strides), names) in operands.iter().zip(&self.equation.inputs) {
            let form = align_one(shape, strides, names, unnamed, &order)
                .ok_or_else(|| OpError::Shape(format!("einsum {text} of a tensor of shape {shape:?}")))?;
            for (size, &n) in sizes.iter_mut().zip(&form.0) {
                match (*size, n) {
                    (1, n) => *size = n,
                    (a, b) if a == b || b == 1 => {}
                    _ => return misfit(format!("einsum {text}: sizes {size} and {n} meet")),
                }
            }
            aligned.operands.push(form);
        }
        Ok(aligned)
    }
}

/// One operand in all dimensions: a letter that occurs twice is its diagonal, a dimension that it lacks has size 1.
fn align_one(
    shape: &[i64],
    strides: &[i64],
    names: &[Name],
    unnamed: usize,
    order: &[(Name, usize)],
) -> Option<(Vec<i64>, Vec<i64>)> {
    let own = shape.len() - names.iter().filter(|&&name| name != Name::Ellipsis).count();
    // The unnamed dimensions are the last of all unnamed ones.
    let dims: Vec<(Name, usize)> = names
        .iter()
        .flat_map(|&name| match name {
            Name::Ellipsis => (unnamed - own..unnamed).map(|i| (name, i)).collect::<Vec<_>>(),
            Name::Letter(_) => vec![(name, 0)],
        })
        .collect();
    let mut form = (Vec::new(), Vec::new());
    for dim in order {
        let at: Vec<usize> = (0..dims.len()).filter(|&d| dims[d] == *dim).collect();
        let size = at.first().map_or(1, |&d| shape[d]);
        if at.iter().any(|&d| shape[d] != size) {
            return None;
        }
        form.0.push(size);
        form.1.push(if at.is_empty() { 1 } else { at.iter().map(|&d| strides[d]).sum() });
    }
    Some(form)
}

impl Aligned {
    fn result_shape(&self) -> Vec<i64> {
        (0..self.kept).map(|d| self.operands.iter().map(|(shape, _)| shape[d]).find(|&n| n != 1).unwrap_or(1)).collect()
    }

    /// The dimensions that each contraction sums: of both operands, of the left and of the right alone.
    fn summed_by(shapes: &[Vec<i64>], left: &[i64], right: &[i64], kept: usize) -> [Vec<usize>; 3] {
        let mut out = [Vec::new(), Vec::new(), Vec::new()];
        for d in kept..left.len() {
            let elsewhere = shapes.iter().any(|shape| shape[d] != 1);
            match (left[d] != 1, right[d] != 1) {
                _ if elsewhere => {}
                (true, true) => out[0].push(d),
                (true, false) => out[1].push(d),
                (false, true) => out[2].push(d),
                (false, false) => {}
            }
        }
        out
    }

    /// The result's strides, and whether a product of matrices was needed.
    fn contract_forms(&self, pairs: &[(usize, usize)]) -> Result<(Vec<i64>, bool), OpError> {
        let mut operands = self.operands.clone();
        let mut products = false;
        // PyTorch multiplies two operands the other way around where that gives the result's order at once.
        let alone = operands.len() == 2;
        for &(a, b) in pairs {
            let ((left, left_strides), (right, right_strides)) = take(&mut operands, a, b);
            let rest: Vec<Vec<i64>> = operands.iter().map(|(shape, _)| shape.clone()).collect();
            let [both, of_left, of_right] = Aligned::summed_by(&rest, &left, &right, self.kept);
            let left = sum_form(left, left_strides, &of_left);
            let right = sum_form(right, right_strides, &of_right);
            let form = if both.is_empty() {
                let shape: Vec<i64> = left.0.iter().zip(&right.0).map(|(&a, &b)| if a == 1 { b } else { a }).collect();
                let strides = strides::of_pointwise(&shape, &[&meta(&left), &meta(&right)]);
                (shape, strides)
            } else {
                products = true;
                let [first, second] =
                    if alone && all_lead(&right.0, &left.0, &both) { [&right, &left] } else { [&left, &right] };
                product_form(&first.0, &second.0, &both)
            };
            bounded(&form.0)?;
            put(&mut operands, form, a, b, pairs);
        }
        let to = &operands[0].0[..self.kept];
        let strides = strides::of_view(&meta(&operands[0]), to).unwrap_or_else(|| row_major(to));
        Ok((strides, products))
    }

    /// The result in row-major order.
    fn contract<T: Arithmetic>(&self, mut data: Vec<Vec<T>>, pairs: &[(usize, usize)]) -> Vec<T> {
        let mut forms = self.operands.clone();
        for &(a, b) in pairs {
            let (left, right) = take(&mut forms, a, b);
            let (x, y) = take(&mut data, a, b);
            let rest: Vec<Vec<i64>> = forms.iter().map(|(shape, _)| shape.clone()).collect();
            let goes = Aligned::summed_by(&rest, &left.0, &right.0, self.kept).concat();
            let mut kept: Vec<i64> = left.0.iter().zip(&right.0).map(|(&a, &b)| if a == 1 { b } else { a }).collect();
            let full = kept.clone();
            for &d in &goes {
                kept[d] = 1;
            }
            let one = |shape: &[i64], strides: &[i64]| {
                let stride = |d: usize| if shape[d] == 1 { 0 } else { strides[d] };
                let part = |sum: bool| {
                    let dims = (0..full.len()).filter(|d| goes.contains(d) == sum);
                    let (sizes, strides): (Vec<i64>, Vec<i64>) = dims.map(|d| (full[d], stride(d))).unzip();
                    places(&sizes, &strides)
                };
                (part(false), part(true))
            };
            let ((x_at, x_sum), (y_at, y_sum)) = (one(&left.0, &left.1), one(&right.0, &right.1));
            let result = x_at.iter().zip(&y_at).map(|(x_at, y_at)| {
                let steps = x_sum.iter().zip(&y_sum);
                steps.fold(T::ZERO, |sum, (x_step, y_step)| sum.mul_add(x[x_at + x_step], y[y_at + y_step]))
            });
            put(&mut data, result.collect(), a, b, pairs);
            let strides = row_major(&kept);
            put(&mut forms, (kept, strides), a, b, pairs);
        }
        // What is left to sum is there only with one operand.
        let (shape, strides) = &forms[0];
        let x = &data[0];
        let (at, steps) =
            (places(&shape[..self.kept], &strides[..self.kept]), places(&shape[self.kept..], &strides[self.kept..]));
        at.iter().map(|at| steps.iter().fold(T::ZERO, |sum, step| sum.mul_add(x[at + step], T::ONE))).collect()
    }
}

/// A form whose dtype nobody asks for.
fn meta((shape, strides): &(Vec<i64>, Vec<i64>)) -> Meta {
    Meta { dtype: DType::F32, shape: shape.clone(), strides: strides.clone(), offset: 0 }
}

fn sum_form(mut shape: Vec<i64>, strides: Vec<i64>, dims: &[usize]) -> (Vec<i64>, Vec<i64>) {
    if dims.is_empty() {
        return (shape, strides);
    }
    for &d in dims {
        shape[d] = 1;
    }
    let strides = row_major(&shape);
    (shape, strides)
}

/// Whether all dimensions of this operand alone stand before those of the other one.
fn all_lead(own: &[i64], other: &[i64], summed: &[usize]) -> bool {
    let alone =
        |a: &[i64], b: &[i64]| (0..a.len()).filter(|d| !summed.contains(d) && a[*d] > 1 && b[*d] == 1).collect();
    let (own, other): (Vec<usize>, Vec<usize>) = (alone(own, other), alone(other, own));
    matches!((own.last(), other.first()), (Some(last), Some(first)) if last < first)
}

/// A batched product `[common, left, 1 for each summed, right]`, row-major, seen in the order of all dimensions.
fn product_form(left: &[i64], right: &[i64], summed: &[usize]) -> (Vec<i64>, Vec<i64>) {
    let class = |d: usize| match (left[d] > 1, right[d] > 1) {
        _ if summed.contains(&d) => 2,
        (true, true) => 0,
        (true, false) => 1,
        _ => 3,
    };
    let mut order: Vec<usize> = (0..left.len()).collect();
    order.sort_by_key(|&d| class(d));
    let size = |d: usize| {
        if class(d) == 2 {
            1
        } else if left[d] > 1 {
            left[d]
        } else {
            right[d]
        }
    };
    let physical: Vec<i64> = order.iter().map(|&d| size(d)).collect();
    let mut form = ((0..left.len()).map(size).collect(), vec![0; left.len()]);
    for (&d, stride) in order.iter().zip(row_major(&physical)) {
        form.1[d] = stride;
    }
    form
}

fn take<T>(list: &mut Vec<T>, a: usize, b: usize) -> (T, T) {
    let (high, low) = (list.remove(a.max(b)), list.remove(a.min(b)));
    if a < b { (low, high) } else { (high, low) }
}

fn put<T>(list: &mut Vec<T>, item: T, a: usize, b: usize, pairs: &[(usize, usize)]) {
    // Without a path, which is (0, 1) again and again, the result is the next left operand.
    if pairs.iter().all(|&pair| pair == (0, 1)) && (a, b) == (0, 1) {
        list.insert(0, item);
    } else {
        list.push(item);
    }
}

fn parse(text: &str) -> Result<Equation, OpError> {
    let bad = |why| OpError::ArgumentValue { name: "equation".into(), value: text.to_owned(), why };
    let clean: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let (inputs, output) =
        clean.split_once("->").map_or((clean.as_str(), None), |(inputs, output)| (inputs, Some(output)));
    let names = |part: &str| -> Result<Vec<Name>, OpError> {
        let mut out = Vec::new();
        let mut rest = part;
        while let Some(c) = rest.chars().next() {
            if let Some(after) = rest.strip_prefix("...") {
                if out.contains(&Name::Ellipsis) {
                    return Err(bad("an operand has two ellipses"));
                }
                out.push(Name::Ellipsis);
                rest = after;
            } else if c.is_ascii_alphabetic() {
                out.push(Name::Letter(c));
                rest = &rest[1..];
            } else {
                return Err(bad("only letters and ellipses name dimensions"));
            }
        }
        Ok(out)
    };
    let inputs = inputs.split(',').map(names).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<Name> = inputs.iter().flatten().copied().collect();
    let times = |name: Name| all.iter().filter(|&&other| other == name).count();
    let output = match output {
        Some(output) => names(output)?,
        // Without an output: the unnamed dimensions, then the letters that occur once, in order.
        None => {
            let mut once: Vec<char> = all
                .iter()
                .filter(|&&name| times(name) == 1)
                .filter_map(|&n| if let Name::Letter(c) = n { Some(c) } else { None })
                .collect();
            once.sort_unstable();
            let ellipsis = all.contains(&Name::Ellipsis).then_some(Name::Ellipsis);
            ellipsis.into_iter().chain(once.into_iter().map(Name::Letter)).collect()
        }
    };
    for (i, &name) in output.iter().enumerate() {
        if output[..i].contains(&name) {
            return Err(bad("the output names a dimension twice"));
        }
        if name != Name::Ellipsis && !all.contains(&name) {
            return Err(bad("the output names a dimension that no operand has"));
        }
    }
    Ok(Equation { inputs, output, text: text.to_owned() })
}

fn einsum(args: &Args<'_>) -> Result<Einsum, OpError> {
    let equation = args.opt_str("equation")?.ok_or_else(|| OpError::MissingArgument("equation".into()))?;
    let path = args.opt_ints("path")?.unwrap_or_default();
    let path = path
        .into_iter()
        .map(|n| match n {
            Int::Known(n) => Ok(n),
            Int::Value(_) => refuse("path", "symbolic", "a number is needed here"),
        })
        .collect::<Result<_, _>>()?;
    Ok(Einsum { equation: parse(equation)?, operands: args.tensors("tensors")?, path })
}
