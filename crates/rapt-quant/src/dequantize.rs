//! From codes to numbers: each product is exact in f64, and is rounded once to the dtype that is asked.

use rapt_core::{DType, ViewMut};

use crate::quantize::filled;
use crate::quantized::shape_is;
use crate::source::{Real, with_real};
use crate::{Format, QuantizedView, Result, codes};

/// Codes, scales and zero points as they are read row by row.
pub(crate) struct Rows<'a> {
    quantized: &'a QuantizedView<'a>,
    codes: rapt_core::Lines<'a, u8>,
    /// What a code's number is multiplied by, group by group.
    steps: Vec<f64>,
    zero_points: Vec<f64>,
    /// The number of each code.
    values: Vec<f64>,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(quantized: &'a QuantizedView<'a>) -> Result<Self> {
        let (form, format) = (&quantized.form, quantized.form.format());
        let mut stored = Vec::new();
        if format.scale_dtype() == DType::F32 {
            stored.extend(quantized.scale.lines::<f32>("scale")?.elements().map(f64::from));
        } else {
            let global = quantized.global_scale.map_or(1.0, f64::from);
            let number = |code: u8| match format {
                Format::Nvfp4 => f64::from(codes::E4M3FN_VALUES[usize::from(code)]) * global,
                _ => codes::from_e8m0(code),
            };
            let bytes = quantized.scale.reinterpreted("scale", DType::U8)?;
            stored.extend(bytes.lines::<u8>("scale")?.elements().map(number));
        }
        let zero_points = match &quantized.zero_point {
            Some(zero_point) => zero_point.lines::<u8>("zero_point")?.elements().map(f64::from).collect(),
            None => Vec::new(),
        };
        Ok(Rows {
            quantized,
            codes: quantized.codes.reinterpreted("codes", DType::U8)?.lines("codes")?,
            steps: (0..form.groups()).map(|group| stored[form.place(group)]).collect(),
            zero_points,
            values: (0..=u8::MAX).map(|code| f64::from(format.decode(code))).collect(),
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.codes.count()
    }

    /// The numbers of row `line`; `out` is as long as a row.
    pub(crate) fn read(&self, line: usize, out: &mut [f64]) {
        let form = &self.quantized.form;
        if form.format().code_bits() == 4 {
            for (pair, byte) in out.chunks_mut(2).zip(self.codes.line(line)) {
                pair[0] = self.values[usize::from(byte & 0xf)];
                if let Some(second) = pair.get_mut(1) {
                    *second = self.values[usize::from(byte >> 4)];
                }
            }
        } else {
            out.iter_mut().zip(self.codes.line(line)).for_each(|(to, code)| *to = self.values[usize::from(code)]);
        }
        let first = form.first_group(line);
        for (group, chunk) in (first..).zip(out.chunks_mut(form.chunk())) {
            let (step, zero_point) = (self.steps[group], self.zero_points.get(group).copied().unwrap_or(0.0));
            chunk.iter_mut().for_each(|x| *x = (*x - zero_point) * step);
        }
    }
}

impl QuantizedView<'_> {
    /// Writes the numbers to `out`, of this tensor's shape and f64, f32, f16 or bf16, through its strides. `out` must not
    /// share memory with the parts, which the two borrows see to where neither is foreign memory.
    ///
    /// # Errors
    /// In [`QuantError::Core`](crate::QuantError::Core): [`ShapeMismatch`](rapt_core::Error::ShapeMismatch),
    /// [`UnsupportedDtype`](rapt_core::Error::UnsupportedDtype), [`DeviceUnavailable`](rapt_core::Error::DeviceUnavailable),
    /// [`OutOfMemory`](rapt_core::Error::OutOfMemory).
    pub fn dequantize_into(&self, out: &mut ViewMut<'_>) -> Result<()> {
        shape_is("out", &out.as_view(), self.form.shape())?;
        with_real!("out", out.dtype(), T => self.write::<T>(out))
    }

    fn write<T: Real>(&self, out: &mut ViewMut<'_>) -> Result<()> {
        let rows = Rows::new(self)?;
        let mut row = filled(0.0, self.form.shape().last().copied().unwrap_or(1))?;
        for line in 0..rows.count() {
            rows.read(line, &mut row);
            out.write_line("out", line, row.iter().map(|&x| T::from_f64(x)))?;
        }
        Ok(())
    }

    /// The numbers, row-major, in f32.
    ///
    /// # Errors
    /// As [`dequantize_into`](QuantizedView::dequantize_into).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut numbers = filled(0f32, self.form.shape().numel().unwrap_or(0))?;
        let mut out = ViewMut::contiguous("out", &mut numbers, *self.form.shape())?;
        self.dequantize_into(&mut out)?;
        Ok(numbers)
    }
}
