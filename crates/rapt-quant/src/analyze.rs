//! What quantizing costs on a tensor: the figures of its elements, and the error of each format and granularity, measured.

use rapt_core::{Lines, View};

use crate::dequantize::Rows;
use crate::quantize::{filled, quantize};
use crate::source::{Real, called, with_real};
use crate::{Form, Format, Granularity, QuantError, Result, ScaleLayout, Scheme};

/// Below this an element counts as zero in [`Analysis::sparsity`].
const TINY: f64 = 1e-6;

/// An error within this factor of the format's least is as good; the smallest of those is recommended.
const AS_GOOD: f64 = 1.1;

/// One way to quantize a tensor, tried on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The format.
    pub format: Format,
    /// Its granularity.
    pub granularity: Granularity,
    /// The mean of the squared errors of all elements.
    pub mse: f64,
    /// The root of the sum of squared errors over that of squared elements; 0 where both are 0.
    pub relative_l2: f64,
    /// Bytes of codes, scales and zero points.
    pub nbytes: usize,
    /// Whether of its format no smaller one has an error within 1.1 times the least: one candidate of each format.
    pub is_recommended: bool,
}

/// The figures of a tensor's elements, and of its candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Analysis {
    /// The least element.
    pub min: f64,
    /// The largest element.
    pub max: f64,
    /// The mean of squared distances from the mean (of the population: over n).
    pub variance: f64,
    /// The mean of absolute values.
    pub mean_abs: f64,
    /// The share of elements with |x| < 1e-6.
    pub sparsity: f64,
    /// The quartiles q1 and q3, linear between neighbours in order.
    pub quartiles: (f64, f64),
    /// How many elements lie outside q1 − 1.5·(q3 − q1) to q3 + 1.5·(q3 − q1).
    pub outliers: usize,
    /// Their share.
    pub outlier_share: f64,
    /// Each format with each granularity that the tensor's rank has, in the order of `formats`, coarse to fine.
    pub candidates: Vec<Candidate>,
}

impl Analysis {
    /// max − min.
    #[must_use]
    pub fn range(&self) -> f64 {
        self.max - self.min
    }

    /// The candidate that is recommended for this format.
    #[must_use]
    pub fn recommended(&self, format: Format) -> Option<&Candidate> {
        self.candidates.iter().find(|it| it.format == format && it.is_recommended)
    }
}

/// The figures of `x` (f64, f32, f16 or bf16, any strides), with blocks of `block_size` for formats that have none of their own.
/// Errors are those of codes made by [`quantize`], not estimates. Takes 8 bytes for each element, and one quantized copy at a time.
///
/// # Errors
/// [`QuantError::NotFinite`] with the first element that is NaN or ±inf; what [`quantize`] refuses; an empty tensor is
/// [`Error::Option`](rapt_core::Error::Option).
pub fn analyze(x: &View<'_>, formats: &[Format], block_size: usize) -> Result<Analysis> {
    let mut analysis = with_real!("x", x.dtype(), T => figures::<T>(&x.lines::<T>("x")?))?;
    let rank = x.shape().len();
    let plain: [(usize, Granularity); 5] = [
        (0, Granularity::Tensor),
        (2, Granularity::Head),
        (1, Granularity::Token),
        (2, Granularity::Channel),
        (1, Granularity::Block(block_size)),
    ];
    for &format in formats {
        let first = analysis.candidates.len();
        if let Some(size) = format.own_block_size() {
            analysis.candidates.push(candidate(x, format, Granularity::Block(size))?);
        } else {
            let least = usize::from(format.code_bits() == 4);
            for (_, granularity) in plain.into_iter().filter(|(needed, _)| rank >= (*needed).max(least)) {
                analysis.candidates.push(candidate(x, format, granularity)?);
            }
        }
        recommend(&mut analysis.candidates[first..]);
    }
    Ok(analysis)
}

fn recommend(candidates: &mut [Candidate]) {
    let least = candidates.iter().fold(f64::INFINITY, |least, it| least.min(it.relative_l2));
    let good = candidates.iter_mut().filter(|it| it.relative_l2 <= AS_GOOD * least);
    if let Some(best) = good.min_by_key(|it| it.nbytes) {
        best.is_recommended = true;
    }
}

fn candidate(x: &View<'_>, format: Format, granularity: Granularity) -> Result<Candidate> {
    let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain)?;
    let quantized = quantize(x, scheme, None)?;
    let view = quantized.view()?;
    let rows = Rows::new(&view)?;
    let (error, size) = with_real!("x", x.dtype(), T => squares::<T>(&x.lines::<T>("x")?, &rows))?;
    let form: &Form = quantized.form();
    Ok(Candidate {
        format,
        granularity,
        mse: error / form.shape().numel().unwrap_or(0).max(1) as f64,
        relative_l2: if error == 0.0 { 0.0 } else { (error / size).sqrt() },
        nbytes: form.nbytes(),
        is_recommended: false,
    })
}

/// The sums of squared errors and of squared elements.
fn squares<T: Real>(x: &Lines<'_, T>, rows: &Rows<'_>) -> Result<(f64, f64)> {
    let mut row = filled(0.0, x.line_len())?;
    let (mut error, mut size) = (0.0, 0.0);
    for line in 0..x.count() {
        rows.read(line, &mut row);
        // Row by row: a sum of n rows then errs by n roundings, not by one for each element.
        let (mut row_error, mut row_size) = (0.0, 0.0);
        for (x, y) in x.line(line).map(Real::to_f64).zip(&row) {
            row_error += (x - y) * (x - y);
            row_size += x * x;
        }
        error += row_error;
        size += row_size;
    }
    Ok((error, size))
}

/// The number at `share` of the way through the sorted numbers, linear between neighbours.
fn quantile(numbers: &mut [f64], share: f64) -> f64 {
    let at = share * (numbers.len() - 1) as f64;
    let below = at as usize;
    let (_, &mut low, above) = numbers.select_nth_unstable_by(below, f64::total_cmp);
    let high = above.iter().copied().min_by(f64::total_cmp).unwrap_or(low);
    low + (high - low) * (at - below as f64)
}

fn figures<T: Real>(x: &Lines<'_, T>) -> Result<Analysis> {
    let count = x.count() * x.line_len();
    if count == 0 {
        let (got, allowed) = ("a tensor without elements".to_owned(), "at least 1 element".to_owned());
        return Err(rapt_core::Error::Option { option: "x", got, allowed }.into());
    }
    let mut numbers = filled(0.0, count)?;
    numbers.iter_mut().zip(x.elements()).for_each(|(to, x)| *to = x.to_f64());
    if let Some(at) = numbers.iter().position(|x| !x.is_finite()) {
        let index = x.index(at / x.line_len(), at % x.line_len());
        return Err(QuantError::NotFinite { index, what: called(numbers[at]) });
    }
    let n = count as f64;
    let mean = numbers.iter().sum::<f64>() / n;
    let (q1, q3) = (quantile(&mut numbers, 0.25), quantile(&mut numbers, 0.75));
    let (low, high) = (q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1));
    let outliers = numbers.iter().filter(|&&x| x < low || x > high).count();
    Ok(Analysis {
        min: numbers.iter().copied().fold(f64::INFINITY, f64::min),
        max: numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        variance: numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n,
        mean_abs: numbers.iter().map(|x| x.abs()).sum::<f64>() / n,
        sparsity: numbers.iter().filter(|x| x.abs() < TINY).count() as f64 / n,
        quartiles: (q1, q3),
        outliers,
        outlier_share: outliers as f64 / n,
        candidates: Vec::new(),
    })
}
