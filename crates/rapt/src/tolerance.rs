//! A tolerance: quantized K and V where their error is small enough, what they were made of elsewhere.
//!
//! ```text
//! judge   of each query head: E = κ·√(estimate² + rounding²·‖ô‖²/3),  relative L2 = E / (‖ô‖ − E),  ε          the backend's `deviations`
//! stand   relative L2 ≤ tolerance and ε < 1
//! run     heads that stand on the codes, the others on the originals: the bits of a plain call on those
//! ```
//! The estimate and the bounds stand in rapt-reference; κ is [`KAPPA`]. Query heads that a kernel computes together (those of one key head,
//! where queries are few, and on NVIDIA GPUs wherever) fall back together. Nothing is written before every head is judged, so a refusal has
//! written nothing. What is here serves host memory; `device` serves NVIDIA GPUs by the same judgement.
//!
//! Deliberately absent: a quantized q, layout BSHD, and errors measured here: `rapt_quant::measure` does that where codes are made.

mod device;

use std::fmt;
use std::sync::Arc;

use rapt_core::{
    Arch, Caps, Codes, Compute, DType, Device, Error, Executor, HeadDeviation, MatrixErrors, Operands, Options,
    PRounding, Plan, Qkv, Result, Spec, TensorLayout, Tensors, View, ViewMut,
};
use rapt_quant::Measured;

use crate::{Engine, spec_of};

/// The factor of the estimate: among 11.1 million rows of many kinds of data with ε < 1, the largest true error was 4.33 times it
/// (docs/internals/calibration.md).
pub const KAPPA: f64 = 5.0;

/// What was measured of a quantized K or V, where its codes lie.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "two lie on the stack for the length of a call")]
pub enum Errors<'a> {
    /// In host memory.
    Host(&'a Measured),
    /// In memory of a device: the numbers of such a [`Measured`] ([`Measured::numbers`]), a flat tensor of float32.
    Device(View<'a>),
}

impl<'a> From<&'a Measured> for Errors<'a> {
    fn from(measured: &'a Measured) -> Self {
        Errors::Host(measured)
    }
}

impl Errors<'_> {
    /// Whether they are those of so many matrices of so many rows and columns, in memory of `device`.
    fn check(&self, tensor: &'static str, [matrices, rows, columns]: [usize; 3], device: Device) -> Result<()> {
        let lies = match self {
            Errors::Host(_) => Device::Cpu,
            Errors::Device(numbers) => numbers.device(),
        };
        if lies != device {
            return Err(Error::DeviceMismatch { tensor, expected: device, got: lies });
        }
        let is_of = match self {
            Errors::Host(measured) => measured.shape() == [matrices, rows, columns],
            Errors::Device(numbers) => {
                let each = rows.saturating_add(columns).saturating_add(1).saturating_mul(2);
                numbers.dtype() == DType::F32 && numbers.shape()[..] == [matrices.saturating_mul(each)]
            }
        };
        if is_of { Ok(()) } else { Err(Error::NotAsPlanned { tensor, what: "measured errors" }) }
    }
}

/// What stands behind a quantized K or V.
#[derive(Clone, Copy, Debug)]
pub struct Backing<'a> {
    /// What was measured when it was quantized.
    pub errors: Errors<'a>,
    /// What it was made of, where it is at hand: of the shape of its numbers, and of the dtype of q.
    pub original: Option<View<'a>>,
}

/// How far the output of a head may be from that on the originals: relative L2.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance<'a> {
    /// Absolute: finite, and above 0.
    pub limit: f64,
    /// Of K, if it is quantized.
    pub k: Option<Backing<'a>>,
    /// Of V, if it is quantized.
    pub v: Option<Backing<'a>>,
}

impl Tolerance<'_> {
    /// Whether errors are judged on a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] anywhere but in host memory and on NVIDIA GPUs.
    pub fn serves(device: Device) -> Result<()> {
        match device {
            Device::Cpu | Device::Cuda(_) => Ok(()),
            _ => unsupported(
                "tolerance on this GPU",
                "errors are judged in host memory and on NVIDIA GPUs",
                "tolerance=None, or tensors on the CPU",
            ),
        }
    }

    /// Whether errors are judged there by threads.
    ///
    /// # Errors
    /// [`Error::Unsupported`] anywhere but in host memory.
    pub fn serves_host(device: Device) -> Result<()> {
        match device {
            Device::Cpu => Ok(()),
            _ => unsupported(
                "tolerance on a GPU",
                "threads judge errors in host memory",
                "tensors on the CPU, or in Rust Engine::attention_within_on_stream for those of an NVIDIA GPU",
            ),
        }
    }
}

/// What was found of one query head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgedHead {
    /// Which batch entry.
    pub batch: usize,
    /// Which query head.
    pub head: usize,
    /// By how much one of its scores may be off.
    pub epsilon: f64,
    /// The estimate of its error, in relative L2.
    pub estimate: f64,
    /// The bound of its error, in relative L2; infinite where none holds.
    pub bound: f64,
    /// Whether it stands on the codes.
    pub is_quantized: bool,
}

/// What was found of all heads of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// What was asked.
    pub limit: f64,
    /// `[batch, num_q_heads]`.
    pub heads: Vec<JudgedHead>,
}

impl Judgement {
    /// Query heads on the codes.
    #[must_use]
    pub fn quantized(&self) -> usize {
        self.heads.iter().filter(|head| head.is_quantized).count()
    }

    /// Query heads on the originals.
    #[must_use]
    pub fn fell_back(&self) -> usize {
        self.heads.len() - self.quantized()
    }

    fn worst(&self, of: impl Fn(&JudgedHead) -> f64) -> f64 {
        self.heads.iter().map(of).fold(0.0, |worst, x| if x.is_nan() || x > worst { x } else { worst })
    }

    /// The largest estimate of any head.
    #[must_use]
    pub fn worst_estimate(&self) -> f64 {
        self.worst(|head| head.estimate)
    }

    /// The largest bound of any head.
    #[must_use]
    pub fn worst_bound(&self) -> f64 {
        self.worst(|head| head.bound)
    }

    /// The largest ε of any head.
    #[must_use]
    pub fn worst_epsilon(&self) -> f64 {
        self.worst(|head| head.epsilon)
    }
}

impl fmt::Display for Judgement {
    /// Lines of the table of a plan: `tolerance`, how many heads run on what, and the worst of all heads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (quantized, fell_back) = (self.quantized(), self.fell_back());
        let [estimate, bound, epsilon] = [self.worst_estimate(), self.worst_bound(), self.worst_epsilon()];
        writeln!(
            f,
            "tolerance: {:e} (relative L2); heads on the codes {quantized}, on the originals {fell_back}",
            self.limit
        )?;
        writeln!(f, "worst estimate {estimate:.3e}, rigorous bound {bound:.3e}, scores off by at most {epsilon:.3e}")
    }
}

/// What an output's dtype, and sums in f32, may change of a number: relative to it, and at least, where it is subnormal.
fn rounding(out: DType) -> [f64; 2] {
    match out {
        DType::BF16 => [1.0 / 256.0, 0.0],
        DType::F16 => [1.0 / 2048.0, 0.5 * f64::from(f32::powi(2.0, -24))],
        _ => [1e-6, 0.0],
    }
}

/// An error over the length of what is meant, of which only a length that is off by it is known.
fn relative(error: f64, norm: f64) -> f64 {
    if error == 0.0 {
        0.0
    } else if error.is_nan() || norm.is_nan() {
        f64::NAN
    } else if error < norm {
        error / (norm - error)
    } else {
        f64::INFINITY
    }
}

/// One plan on the codes, another on the originals.
struct Plans {
    codes: Arc<Plan>,
    /// `None` where an original is not at hand.
    originals: Option<Arc<Plan>>,
    /// Query heads that fall back together.
    together: usize,
}

fn unsupported<T>(what: &str, why: &str, instead: &str) -> Result<T> {
    Err(Error::unsupported(what.to_owned(), why.to_owned(), instead.to_owned()))
}

/// What only a request that has codes to judge may ask.
fn check(tensors: &Tensors<'_>, options: &Options, spec: &Spec, tolerance: &Tolerance<'_>) -> Result<()> {
    let refuse =
        |allowed: String| Err(Error::Option { option: "tolerance", got: tolerance.limit.to_string(), allowed });
    if !(tolerance.limit.is_finite() && tolerance.limit > 0.0) {
        return refuse("None, or a finite number above 0".into());
    }
    if tensors.codes.q.is_some() {
        return unsupported("tolerance with a quantized q", "errors are measured of k and v", "q as numbers");
    }
    if spec.compute != Compute::Exact {
        let why = "what is judged is how far codes are from the originals where nothing else is rounded";
        return unsupported("tolerance with compute=\"int8\"", why, "compute=\"exact\", or tolerance=None");
    }
    if options.layout == TensorLayout::Bshd {
        let why = "errors are measured of matrices [len, head_dim]";
        return unsupported("tolerance with layout 'bshd'", why, "layout 'bhsd' on tensors permuted to it");
    }
    if tensors.codes.k.is_none() && tensors.codes.v.is_none() {
        return refuse("None: neither k nor v is quantized".into());
    }
    let of_k = (&tensors.codes.k, tolerance.k, spec.head_dim());
    let of_v = (&tensors.codes.v, tolerance.v, spec.head_dim_v());
    for (tensor, (codes, backing, dim)) in [("k", of_k), ("v", of_v)] {
        let backing = match (codes, backing) {
            (None, None) => continue,
            (None, Some(_)) => return refuse(format!("no measured errors of {tensor}, which has numbers")),
            (Some(_), None) => {
                let instead = "Quantize it with keep_original or measure_errors";
                return refuse(format!("None: {tensor} carries no measured errors. {instead}"));
            }
            (Some(_), Some(backing)) => backing,
        };
        backing.errors.check(tensor, [spec.batch() * spec.num_kv_heads(), spec.kv_len(), dim], spec.device)?;
    }
    Ok(())
}

/// The tensors of the run on the originals; `None` where one is not at hand.
fn on_originals<'a>(tensors: &Tensors<'a>, tolerance: &Tolerance<'a>) -> Option<[View<'a>; 2]> {
    let of = |codes: bool, tensor: View<'a>, backing: Option<Backing<'a>>| {
        if codes { backing.and_then(|backing| backing.original) } else { Some(tensor) }
    };
    let k = of(tensors.codes.k.is_some(), tensors.k, tolerance.k)?;
    let v = of(tensors.codes.v.is_some(), tensors.v, tolerance.v)?;
    Some([k, v])
}

/// All of a tensor that is written, to be written twice.
fn again<'a>(view: &'a mut ViewMut<'_>) -> ViewMut<'a> {
    let len = view.shape().first().copied().unwrap_or(0);
    view.narrow(0, &(0..len))
}

/// Refuses what the run on the originals would refuse, whatever the heads turn out to be.
fn check_originals(tensors: &mut Tensors<'_>, spec: Option<&Spec>, tolerance: &Tolerance<'_>) -> Result<()> {
    let Some((spec, [k, v])) = spec.zip(on_originals(tensors, tolerance)) else { return Ok(()) };
    let Tensors { q, mask, sinks, alibi_slopes, out, lse, .. } = tensors;
    let (mask, sinks, alibi_slopes, lse) = (*mask, *sinks, *alibi_slopes, lse.as_mut().map(again));
    let of_originals = Tensors { mask, sinks, alibi_slopes, lse, ..Tensors::new(*q, k, v, again(out)) };
    Operands::check(of_originals, spec).map(drop)
}

/// The request on the originals, which have the sizes of the one on the codes.
fn spec_of_originals(tensors: &Tensors<'_>, [k, v]: [View<'_>; 2], options: &Options, of_codes: &Spec) -> Result<Spec> {
    let mut builder = Spec::builder(&tensors.q, &k, &v, options);
    builder
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(&tensors.out);
    if let Some(lse) = &tensors.lse {
        builder.lse(lse);
    }
    let spec = builder.build()?;
    let sizes = |spec: &Spec| [spec.kv_len(), spec.head_dim(), spec.head_dim_v(), spec.num_kv_heads()];
    if sizes(&spec) == sizes(of_codes) {
        Ok(spec)
    } else {
        Err(Error::NotAsPlanned { tensor: "original", what: "shape" })
    }
}

/// What both runs read alike.
struct Inputs<'a> {
    q: View<'a>,
    codes: Qkv<Option<Box<Codes<'a>>>>,
    mask: Option<View<'a>>,
    sinks: Option<View<'a>>,
    alibi_slopes: Option<View<'a>>,
}

impl<'a> Inputs<'a> {
    fn tensors<'b>(
        &self,
        [k, v]: [View<'a>; 2],
        on_codes: bool,
        out: ViewMut<'b>,
        lse: Option<ViewMut<'b>>,
    ) -> Tensors<'b>
    where
        'a: 'b,
    {
        let codes = if on_codes { self.codes.clone() } else { Qkv::default() };
        let Inputs { q, mask, sinks, alibi_slopes, .. } = self;
        let (q, mask, sinks, alibi_slopes) = (*q, *mask, *sinks, *alibi_slopes);
        Tensors { codes, mask, sinks, alibi_slopes, lse, ..Tensors::new(q, k, v, out) }
    }
}

impl Engine {
    /// Judges every head of a request on codes, and writes nothing.
    ///
    /// # Errors
    /// As [`Engine::attention_within`], less [`Error::ToleranceExceeded`].
    pub fn judge(&self, tensors: Tensors<'_>, options: &Options, tolerance: &Tolerance<'_>) -> Result<Judgement> {
        self.judge_on(tensors, options, tolerance, self.executor())
    }

    /// [`Engine::judge`] on somebody else's threads.
    ///
    /// # Errors
    /// As [`Engine::judge`].
    pub fn judge_on(
        &self,
        mut tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        executor: &dyn Executor,
    ) -> Result<Judgement> {
        let plans = self.plans_within(&tensors, options, tolerance, executor)?;
        check_originals(&mut tensors, plans.originals.as_deref().map(Plan::spec), tolerance)?;
        judged(&plans, &mut Operands::check(tensors, plans.codes.spec())?, tolerance, executor)
    }

    /// [`Engine::attention_into`] of a request on codes: heads whose estimated error is within the tolerance are computed on the codes, the
    /// others on the originals, with the bits of a plain call on those.
    ///
    /// # Errors
    /// [`Error::ToleranceExceeded`] with the first head that would fall back where an original is not at hand; [`Error::Option`] for a
    /// limit that is none, operands without codes, and codes without measured errors; [`Error::Unsupported`] on a GPU
    /// ([`Engine::attention_within_on_stream`] serves NVIDIA's), with a quantized q and with layout BSHD; any other [`Error`] of a plain call on the codes, and on the originals. Nothing is written then.
    pub fn attention_within(
        &self,
        tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
    ) -> Result<Judgement> {
        self.attention_within_on(tensors, options, tolerance, self.executor())
    }

    /// [`Engine::attention_within`] on somebody else's threads.
    ///
    /// # Errors
    /// As [`Engine::attention_within`].
    pub fn attention_within_on(
        &self,
        mut tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        executor: &dyn Executor,
    ) -> Result<Judgement> {
        let plans = self.plans_within(&tensors, options, tolerance, executor)?;
        check_originals(&mut tensors, plans.originals.as_deref().map(Plan::spec), tolerance)?;
        let originals = on_originals(&tensors, tolerance);
        let Tensors {
            mut out, mut lse, q, k, v, codes, mask, sinks, alibi_slopes, page_table, lengths, offsets, ..
        } = tensors;
        let inputs = Inputs { q, codes, mask, sinks, alibi_slopes };
        debug_assert!(page_table.is_none() && lengths.is_none() && offsets.is_none(), "a dense request");
        let (of_codes, num_q_heads) = (plans.codes.spec(), plans.codes.spec().num_q_heads());
        let on_codes = inputs.tensors([k, v], true, again(&mut out), lse.as_mut().map(again));
        let mut operands = Operands::check(on_codes, of_codes)?;
        let judgement = judged(&plans, &mut operands, tolerance, executor)?;
        let bytes = plans.codes.workspace_bytes();
        let Some(first) = judgement.heads.iter().find(|head| !head.is_quantized) else {
            self.with_workspace(bytes, |workspace| rapt_cpu::run(&plans.codes, &mut operands, workspace, executor))?;
            return Ok(judgement);
        };
        let Some((plan, originals)) = plans.originals.as_ref().zip(originals) else {
            let JudgedHead { batch, head, estimate, epsilon, .. } = *first;
            return Err(Error::ToleranceExceeded { batch, head, estimate, epsilon, tolerance: tolerance.limit });
        };
        let is_quantized = |batch: usize, head: usize| judgement.heads[batch * num_q_heads + head].is_quantized;
        self.with_workspace(bytes.max(plan.workspace_bytes()), |workspace| {
            let on_originals = inputs.tensors(originals, false, again(&mut out), lse.as_mut().map(again));
            // `check_originals` proved it, and `judged` ran on operands that were proven: no check refuses after the first run.
            let mut operands = Operands::check(on_originals, plan.spec())?;
            rapt_cpu::run_heads(plan, &mut operands, workspace, executor, |batch, head| !is_quantized(batch, head))?;
            let on_codes = inputs.tensors([k, v], true, again(&mut out), lse.as_mut().map(again));
            let mut operands = Operands::check(on_codes, of_codes)?;
            rapt_cpu::run_heads(&plans.codes, &mut operands, workspace, executor, is_quantized)
        })?;
        Ok(judgement)
    }

    fn plans_within(
        &self,
        tensors: &Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        executor: &dyn Executor,
    ) -> Result<Plans> {
        self.expect_host("a tolerance of codes")?;
        let spec = spec_of(tensors, options)?;
        Tolerance::serves_host(spec.device)?;
        check(tensors, options, &spec, tolerance)?;
        let mut codes = self.plan_for(&spec, executor.threads())?;
        if codes.key().p_rounding != PRounding::Accumulation {
            // What weights are rounded by stands in no bound: products of float32 round them no further.
            let caps = Caps { arch: Arch::Avx512, threads: executor.threads(), ..self.caps().clone() };
            codes = Arc::new(rapt_cpu::select(&spec, &caps)?);
        }
        let mut together = rapt_cpu::heads_together(&codes)?;
        let originals = match on_originals(tensors, tolerance) {
            None => None,
            Some([k, v]) => {
                let of_originals = spec_of_originals(tensors, [k, v], options, &spec)?;
                let plan = self.plan_for(&of_originals, executor.threads())?;
                together = together.max(rapt_cpu::heads_together(&plan)?);
                Some(plan)
            }
        };
        Ok(Plans { codes, originals, together })
    }
}

/// What was measured of every matrix.
fn matrices(backing: Option<Backing<'_>>) -> Option<Vec<MatrixErrors<'_>>> {
    // `check` found them in host memory.
    let Errors::Host(errors) = backing?.errors else { return None };
    Some((0..errors.shape()[0]).map(|at| errors.matrix(at)).collect())
}

/// The relative errors of every head, and which of them stand.
fn judged(
    plans: &Plans,
    operands: &mut Operands<'_>,
    tolerance: &Tolerance<'_>,
    executor: &dyn Executor,
) -> Result<Judgement> {
    let spec = plans.codes.spec();
    let errors = Qkv {
        q: None,
        k: matrices(tolerance.k.filter(|_| spec.codes.k.is_some())),
        v: matrices(tolerance.v.filter(|_| spec.codes.v.is_some())),
    };
    let found = rapt_cpu::deviations(&plans.codes, operands, &errors, executor)?;
    Ok(judgement_of(&found, spec, tolerance.limit, plans.originals.is_some().then_some(plans.together)))
}

/// Which heads stand by what was found of them; `together`: so many that fall back together, where there are originals.
fn judgement_of(found: &[HeadDeviation], spec: &Spec, limit: f64, together: Option<usize>) -> Judgement {
    let ([rounding, least], num_q_heads) = (rounding(spec.out.dtype), spec.num_q_heads());
    let least = least * ((spec.q_len() * spec.head_dim_v()) as f64).sqrt();
    let judge = |(at, of): (usize, &HeadDeviation)| {
        let rounded = rounding * of.norm;
        let estimate = KAPPA * (of.estimate.powi(2) + (rounded * rounded + least * least) / 3.0).sqrt();
        let bound = of.before.min(of.after) + rounded + least;
        let bound = if of.before.is_nan() || of.after.is_nan() { f64::NAN } else { bound };
        let estimate = relative(estimate, of.norm);
        JudgedHead {
            batch: at / num_q_heads,
            head: at % num_q_heads,
            epsilon: of.epsilon,
            estimate,
            bound: relative(bound, of.norm),
            // False where either is NaN.
            is_quantized: estimate <= limit && of.epsilon < 1.0,
        }
    };
    let mut heads: Vec<JudgedHead> = found.iter().enumerate().map(judge).collect();
    if let Some(together) = together {
        for together in heads.chunks_mut(together.max(1)) {
            let all = together.iter().all(|head| head.is_quantized);
            together.iter_mut().for_each(|head| head.is_quantized = all);
        }
    }
    Judgement { limit, heads }
}
