//! Systems of linear equations: inverses, solutions, determinants, and Cholesky's factor.
//!
//! | operators | result |
//! |---|---|
//! | `linalg_inv`, `inverse`, `linalg_inv_ex` | `A⁻¹` |
//! | `linalg_solve`, `linalg_solve_ex`, `_linalg_solve_ex` | `X` of `A X = B`, or of `X A = B`; B may be vectors |
//! | `linalg_det`, `det`, `_linalg_det`; `linalg_slogdet`, `slogdet`, `_linalg_slogdet`; `logdet` | the determinant; its sign and the logarithm of its size; its logarithm |
//! | `linalg_cholesky`, `linalg_cholesky_ex` | `L` of `A = L Lᵀ`, or `U` of `A = Uᵀ U` |
//! | `linalg_solve_triangular`, `triangular_solve` | `X` where A is a triangle |
//! | `cholesky_solve`, `cholesky_inverse` | the same of `L Lᵀ` |
//!
//! In f64 by `factors.rs`, rounded once. Without `_ex` a matrix that is singular, or not positive definite, ends the run; with it `info`
//! says where: the first pivot that is 0, the first leading part that is not positive definite, counted from 1; 0 where all is well. Then
//! solutions are what divisions by that 0 give, and a factor of Cholesky is NaN. The inverse, the solutions and the determinant of a
//! matrix with a number that is not finite are NaN, and it is not called singular; the sign of its determinant is 0.
//!
//! Results lie column by column, as LAPACK has them; solutions of `X A = B` row by row.
//!
//! Deliberately absent: the factors of LU, which `_linalg_solve_ex` and `_linalg_det` give for gradients.

use rapt_core::DType;

use super::factors::{Lu, Triangle, cholesky};
use super::shape::{count, expand_places, fresh, misfit, need_same};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A system of equations, or what is computed of its matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    /// The matrices.
    a: ValueId,
    /// The right-hand sides, of operators that have them.
    b: Option<ValueId>,
    what: What,
    /// The name in messages of what may not fail; `None` where it may.
    checked: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Inverse {
        /// Whether `info` is a result.
        info: bool,
    },
    Solution {
        left: bool,
        info: bool,
        /// Whether factors stand among the results.
        factors: bool,
    },
    Determinant {
        kind: Kind,
        factors: bool,
    },
    Cholesky {
        upper: bool,
        info: bool,
    },
    Triangular {
        upper: bool,
        transposed: bool,
        unit: bool,
        left: bool,
        /// Whether the matrix is a result too.
        copies: bool,
    },
    /// Of the matrix that these are the factor of.
    OfFactor {
        upper: bool,
    },
    /// `_linalg_check_errors`: that each `info` is 0.
    Check {
        definite: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    SignAndLog,
    Log,
}

impl System {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<System, OpError>> {
        let plain = |kind, factors| Ok(What::Determinant { kind, factors });
        let name = target.strip_prefix("torch.ops.aten.")?.strip_suffix(".default")?;
        let (a, b, what, checked) = match name {
            "linalg_inv" => ("A", None, Ok(What::Inverse { info: false }), Some("linalg.inv")),
            "inverse" => ("self", None, Ok(What::Inverse { info: false }), Some("linalg.inv")),
            "linalg_inv_ex" => ("A", None, Ok(What::Inverse { info: true }), None),
            "linalg_solve" => ("A", Some("B"), solution(args, false, false), Some("linalg.solve")),
            "linalg_solve_ex" => ("A", Some("B"), solution(args, true, false), None),
            "_linalg_solve_ex" => ("A", Some("B"), solution(args, true, true), None),
            "linalg_det" => ("A", None, plain(Kind::Plain, false), None),
            "det" => ("self", None, plain(Kind::Plain, false), None),
            "_linalg_det" => ("A", None, plain(Kind::Plain, true), None),
            "linalg_slogdet" => ("A", None, plain(Kind::SignAndLog, false), None),
            "slogdet" => ("self", None, plain(Kind::SignAndLog, false), None),
            "_linalg_slogdet" => ("A", None, plain(Kind::SignAndLog, true), None),
            "logdet" => ("self", None, plain(Kind::Log, false), None),
            "linalg_cholesky" => ("self", None, factor(args, false), Some("linalg.cholesky")),
            "linalg_cholesky_ex" => ("self", None, factor(args, true), None),
            "linalg_solve_triangular" => ("self", Some("B"), triangular(args), None),
            "triangular_solve" => ("A", Some("self"), transposed(args), None),
            "cholesky_solve" => ("input2", Some("self"), of_factor(args), None),
            "cholesky_inverse" => ("self", None, of_factor(args), Some("cholesky_inverse")),
            "_linalg_check_errors" => return Some(check(args)),
            _ => return None,
        };
        let ex = match name {
            "linalg_inv_ex" => Some("linalg.inv"),
            "linalg_solve_ex" | "_linalg_solve_ex" => Some("linalg.solve"),
            "linalg_cholesky_ex" => Some("linalg.cholesky"),
            _ => None,
        };
        Some(what.and_then(|what| {
            let checked = if ex.is_some() && args.bool_or("check_errors", false)? { ex } else { checked };
            Ok(System { a: args.tensor(a)?, b: b.map(|b| args.tensor(b)).transpose()?, what, checked })
        }))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.a)?;
        if let What::Check { .. } = self.what {
            return if meta.dtype == DType::I32 {
                Ok(Vec::new())
            } else {
                Err(OpError::Dtype { what: "a verdict on matrices", dtype: meta.dtype })
            };
        }
        let Sizes { shape, vectors, batch, .. } = self.sizes(shapes)?;
        let dtype = meta.dtype;
        let [lead @ .., size, _] = &meta.shape[..] else { return misfit("no matrix") };
        let number = || fresh(dtype, lead);
        let info = || fresh(DType::I32, lead);
        let factors = || {
            let pivots = fresh(DType::I32, &[lead, &[*size]].concat())?;
            Ok::<_, OpError>([by_columns(dtype, &meta.shape)?, pivots])
        };
        let mut outs = match self.what {
            What::Inverse { .. } | What::Cholesky { .. } => vec![by_columns(dtype, &shape)?],
            What::Determinant { kind: Kind::SignAndLog, .. } => vec![number()?, number()?],
            What::Determinant { .. } => vec![number()?],
            What::Solution { left: false, .. } => vec![fresh(dtype, &shape)?],
            What::Solution { .. } if vectors => vec![by_columns(dtype, &shape[..shape.len() - 1])?],
            _ => vec![by_columns(dtype, &shape)?],
        };
        match self.what {
            What::Triangular { copies: true, .. } => {
                outs.push(by_columns(dtype, &[&batch[..], &[*size, *size]].concat())?);
            }
            What::Solution { factors: true, .. } | What::Determinant { factors: true, .. } => outs.extend(factors()?),
            _ => {}
        }
        if let What::Inverse { info: true } | What::Solution { info: true, .. } | What::Cholesky { info: true, .. } =
            self.what
        {
            outs.push(info()?);
        }
        Ok(outs)
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let a = eval.tensor(self.a)?;
        match self.what {
            What::Check { definite } => self.verdict(&a.ints(), definite),
            What::Determinant { kind, .. } => {
                self.determinants(eval, a, kind, outs);
                Ok(())
            }
            What::Inverse { .. } | What::Solution { .. } => self.solve(eval, outs),
            What::Cholesky { upper, .. } => {
                let size = count(a.meta.shape[a.meta.rank() - 1]);
                let (mut factors, mut info) = (Vec::new(), Vec::new());
                for mut matrix in matrices(a, size) {
                    if upper {
                        transpose(&mut matrix, size);
                    }
                    let (factor, failed) = match cholesky(&matrix, size) {
                        Ok(factor) => (factor, 0),
                        Err(order) => (vec![f64::NAN; size * size], order as i64),
                    };
                    matrix = factor;
                    if upper {
                        transpose(&mut matrix, size);
                    }
                    factors.extend(matrix);
                    info.push(failed);
                }
                self.verdict(&info, true)?;
                outs[0].write_floats(eval.precision(), factors);
                self.write_info(outs, info);
                Ok(())
            }
            What::Triangular { .. } | What::OfFactor { .. } => self.solve_triangles(eval, outs),
        }
    }

    /// Whether it has no result, and ends the run where a matrix failed.
    #[must_use]
    pub fn asserts(&self) -> bool {
        matches!(self.what, What::Check { .. })
    }

    /// The places of the results that are not computed.
    pub(crate) fn absent(&self) -> &'static [usize] {
        match self.what {
            What::Determinant { kind: Kind::SignAndLog, factors: true } => &[2, 3],
            What::Determinant { factors: true, .. } | What::Solution { factors: true, .. } => &[1, 2],
            _ => &[],
        }
    }

    /// An error for the first matrix that failed, where that is one.
    fn verdict(&self, info: &[i64], definite: bool) -> Result<(), OpError> {
        let Some(name) = self.checked else { return Ok(()) };
        match info.iter().enumerate().find(|(_, info)| **info != 0) {
            None => Ok(()),
            Some((place, &at)) => Err(OpError::Singular { name, place, at, definite }),
        }
    }

    fn write_info(&self, outs: &[Tensor], info: Vec<i64>) {
        if let (Some(out), true) = (outs.last(), outs.len() > 1) {
            out.write_ints(info);
        }
    }

    fn determinants(&self, eval: &dyn Eval, a: &Tensor, kind: Kind, outs: &[Tensor]) {
        let size = count(a.meta.shape[a.meta.rank() - 1]);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for matrix in matrices(a, size) {
            let lu = Lu::of(&matrix, size);
            let finite = is_finite(&matrix);
            let sign = |x: f64| if x == 0.0 { x } else { x.signum() };
            let log = || if finite { lu.parts_of_determinant().map(|x| x.abs().ln()).sum() } else { f64::NAN };
            let signs = || if finite { lu.parts_of_determinant().map(sign).product() } else { 0.0 };
            match kind {
                Kind::Plain if finite => first.push(lu.parts_of_determinant().product()),
                Kind::Plain => first.push(f64::NAN),
                Kind::SignAndLog => {
                    first.push(signs());
                    second.push(log());
                }
                Kind::Log => first.push(if signs() < 0.0 { f64::NAN } else { log() }),
            }
        }
        outs[0].write_floats(eval.precision(), first);
        if kind == Kind::SignAndLog {
            outs[1].write_floats(eval.precision(), second);
        }
    }

    fn solve(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let a = eval.tensor(self.a)?;
        let sizes = self.sizes(eval)?;
        let size = count(a.meta.shape[a.meta.rank() - 1]);
        let left = !matches!(self.what, What::Solution { left: false, .. });
        let factored: Vec<(Lu, bool)> = matrices(a, size)
            .map(|mut matrix| {
                if !left {
                    transpose(&mut matrix, size);
                }
                (Lu::of(&matrix, size), is_finite(&matrix))
            })
            .collect();
        let info: Vec<i64> =
            factored.iter().map(|(lu, finite)| if *finite { lu.singular_at as i64 } else { 0 }).collect();
        self.verdict(&info, false)?;
        let solved = sizes.each(eval, self.b, left, |matrix, column| {
            let (lu, finite) = &factored[matrix];
            if *finite {
                lu.solve(column);
            } else {
                column.fill(f64::NAN);
            }
        })?;
        outs[0].write_floats(eval.precision(), solved);
        self.write_info(outs, info);
        Ok(())
    }

    fn solve_triangles(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let a = eval.tensor(self.a)?;
        let sizes = self.sizes(eval)?;
        let size = count(a.meta.shape[a.meta.rank() - 1]);
        let cells: Vec<Vec<f64>> = matrices(a, size).collect();
        match self.what {
            What::Triangular { upper, transposed, unit, left, copies } => {
                // X A = B is Aᵀ Xᵀ = Bᵀ.
                let transposed = transposed == left;
                let solved = sizes.each(eval, self.b, left, |matrix, column| {
                    Triangle { cells: &cells[matrix], size, upper, transposed, unit }.solve(column);
                })?;
                outs[0].write_floats(eval.precision(), solved);
                if copies {
                    let all = a.broadcast(&outs[1].meta.shape).floats();
                    outs[1].write_floats(eval.precision(), all);
                }
            }
            What::OfFactor { upper } => {
                let zero = |cells: &Vec<f64>| (0..size).position(|k| cells[k * size + k] == 0.0);
                let info: Vec<i64> = cells.iter().map(|cells| zero(cells).map_or(0, |k| k as i64 + 1)).collect();
                self.verdict(&info, false)?;
                let solved = sizes.each(eval, self.b, true, |matrix, column| {
                    let lower = Triangle { cells: &cells[matrix], size, upper, transposed: upper, unit: false };
                    lower.solve(column);
                    Triangle { transposed: !upper, ..lower }.solve(column);
                })?;
                outs[0].write_floats(eval.precision(), solved);
            }
            _ => {}
        }
        Ok(())
    }

    fn sizes(&self, shapes: &dyn Shapes) -> Result<Sizes, OpError> {
        let a = shapes.meta(self.a)?;
        if !matches!(a.dtype, DType::F32 | DType::F64) {
            return Err(OpError::Dtype { what: "a system of equations", dtype: a.dtype });
        }
        let [lead @ .., rows, columns] = &a.shape[..] else {
            return misfit(format!("a matrix of shape {:?}", a.shape));
        };
        if rows != columns {
            return misfit(format!("a square matrix is expected, and the shape is {:?}", a.shape));
        }
        let Some(b) = self.b else {
            let (matrices, batch) = (expand_places(lead, lead)?, lead.to_vec());
            return Ok(Sizes { matrices, shape: a.shape.clone(), vectors: false, batch });
        };
        let b = shapes.meta(b)?;
        need_same(a.dtype, b.dtype)?;
        let text = || format!("matrices of shape {:?} for right-hand sides of shape {:?}", a.shape, b.shape);
        let left = !matches!(self.what, What::Solution { left: false, .. } | What::Triangular { left: false, .. });
        let vectors = matches!(self.what, What::Solution { .. })
            && (b.rank() == 1 || (a.rank() == b.rank() + 1 && b.shape[..] == a.shape[..b.rank()]));
        let own = if vectors { [&b.shape[..], &[1]].concat() } else { b.shape.clone() };
        let [b_lead @ .., b_rows, b_columns] = &own[..] else { return misfit(text()) };
        if (vectors && !left) || rows != if left { b_rows } else { b_columns } {
            return misfit(text());
        }
        let batch = strides::broadcast([lead, b_lead])?;
        let shape = [&batch[..], &[*b_rows, *b_columns]].concat();
        Ok(Sizes { matrices: expand_places(lead, &batch)?, shape, vectors, batch })
    }
}

/// A system in numbers.
struct Sizes {
    /// Of each right-hand side's matrix, which of the left-hand side it belongs to.
    matrices: Vec<usize>,
    /// The right-hand sides' shape; vectors are columns.
    shape: Vec<i64>,
    vectors: bool,
    /// All dimensions but the last two.
    batch: Vec<i64>,
}

impl Sizes {
    /// Solves for each column, or each row, of the right-hand sides, or of the identity where there are none. In row-major order.
    fn each(
        &self,
        eval: &dyn Eval,
        b: Option<ValueId>,
        by_columns: bool,
        solve: impl Fn(usize, &mut [f64]),
    ) -> Result<Vec<f64>, OpError> {
        let [.., rows, columns] = self.shape[..] else { return misfit("no matrix") };
        let (rows, columns) = (count(rows), count(columns));
        let mut cells = match b {
            Some(b) => {
                let b = eval.tensor(b)?;
                let mut meta = b.meta.clone();
                if self.vectors {
                    meta.shape.push(1);
                    meta.strides.push(0);
                }
                b.view(meta).broadcast(&self.shape).floats()
            }
            None => {
                let one = |cell: usize| if cell / columns == cell % columns { 1.0 } else { 0.0 };
                self.matrices.iter().flat_map(|_| (0..rows * columns).map(one)).collect()
            }
        };
        let (length, lines) = if by_columns { (rows, columns) } else { (columns, rows) };
        let mut line = vec![0.0; length];
        for (matrix, cells) in self.matrices.iter().zip(cells.chunks_mut((rows * columns).max(1))) {
            for n in 0..lines {
                let at = |k: usize| if by_columns { k * columns + n } else { n * columns + k };
                line.iter_mut().enumerate().for_each(|(k, x)| *x = cells[at(k)]);
                solve(*matrix, &mut line);
                line.iter().enumerate().for_each(|(k, x)| cells[at(k)] = *x);
            }
        }
        Ok(cells)
    }
}

/// The matrices of a tensor, each row by row.
fn matrices(tensor: &Tensor, size: usize) -> impl Iterator<Item = Vec<f64>> {
    let batch: usize = tensor.meta.shape.iter().rev().skip(2).map(|&n| count(n)).product();
    let cells = tensor.floats();
    (0..batch).map(move |n| cells[n * size * size..][..size * size].to_vec())
}

fn is_finite(matrix: &[f64]) -> bool {
    matrix.iter().all(|x| x.is_finite())
}

fn transpose(matrix: &mut [f64], size: usize) {
    for row in 0..size {
        for column in 0..row {
            matrix.swap(row * size + column, column * size + row);
        }
    }
}

/// A tensor of its own whose matrices lie column by column.
fn by_columns(dtype: DType, shape: &[i64]) -> Result<Out, OpError> {
    fresh(dtype, shape)?;
    let mut form = Meta::contiguous(dtype, shape);
    if let Some(d) = form.rank().checked_sub(2) {
        form.shape.swap(d, d + 1);
        form = Meta::contiguous(dtype, &form.shape);
        form.shape.swap(d, d + 1);
        form.strides.swap(d, d + 1);
    }
    Ok(Out::Fresh(form))
}

fn solution(args: &Args<'_>, info: bool, factors: bool) -> Result<What, OpError> {
    Ok(What::Solution { left: args.bool_or("left", true)?, info, factors })
}

fn factor(args: &Args<'_>, info: bool) -> Result<What, OpError> {
    Ok(What::Cholesky { upper: args.bool_or("upper", false)?, info })
}

fn triangular(args: &Args<'_>) -> Result<What, OpError> {
    Ok(What::Triangular {
        upper: args.bool_or("upper", false)?,
        transposed: false,
        unit: args.bool_or("unitriangular", false)?,
        left: args.bool_or("left", true)?,
        copies: false,
    })
}

fn transposed(args: &Args<'_>) -> Result<What, OpError> {
    Ok(What::Triangular {
        upper: args.bool_or("upper", true)?,
        transposed: args.bool_or("transpose", false)?,
        unit: args.bool_or("unitriangular", false)?,
        left: true,
        copies: true,
    })
}

fn of_factor(args: &Args<'_>) -> Result<What, OpError> {
    Ok(What::OfFactor { upper: args.bool_or("upper", false)? })
}

/// `_linalg_check_errors`, whose operand says of each matrix whether it failed.
fn check(args: &Args<'_>) -> Result<System, OpError> {
    args.bool_or("is_matrix", false)?;
    let checked = match args.opt_str("api_name")?.unwrap_or_default() {
        name if name.contains("cholesky") => "linalg.cholesky",
        name if name.contains("solve") => "linalg.solve",
        name if name.contains("inv") => "linalg.inv",
        _ => "linalg",
    };
    let definite = checked == "linalg.cholesky";
    Ok(System { a: args.tensor("info")?, b: None, what: What::Check { definite }, checked: Some(checked) })
}
