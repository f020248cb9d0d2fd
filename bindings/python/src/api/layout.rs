//! `rapt.layout`: the layout algebra and the checker for Python. Conversion of tuples, texts and reports, no algebra.
//!
//! Reports cross as JSON text, which `rapt/layout.py` reads: their form is rapt-layout's own and is described once.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString, PyTuple};
use rapt::ErrorKind;
use rapt::layout::atlas::{self, Atom};
use rapt::layout::draw::{Grid, Window, atom_json, report_svg};
use rapt::layout::emulate::{self, Case};
use rapt::layout::unit::{Quantity, Unit};
use rapt::layout::{Arrangement, ComposedLayout, Coord, Error, IntTuple, Layout, MAX_DEPTH, Tiler, check};

use crate::errors::hints;
use crate::errors::{Failure, Wording, raise};
use crate::kind::Kind;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// The exception for an error of the algebra: a unit mix-up is a `KindError`, a word or a file an `OptionError`, the rest a
/// `LayoutError`.
fn refuse(py: Python<'_>, error: &Error) -> PyErr {
    let (kind, hint) = match error {
        Error::UnitMismatch { left, .. } => {
            (ErrorKind::Kind, format!("rapt.layout.Quantity.to({:?})", left.to_string()))
        }
        Error::SpaceMismatch { .. } => (ErrorKind::Kind, String::new()),
        Error::Word { .. } | Error::File { .. } => (ErrorKind::Option, String::new()),
        _ => (ErrorKind::Layout, String::new()),
    };
    let wording = Wording { names: &hints::ATTENTION, kind: Kind::Numpy };
    raise(py, Failure::binding(kind, error.to_string(), hint), wording)
}

/// Integers and nested tuples of them; text is read as notation.
fn int_tuple(value: Any<'_, '_>, depth: usize) -> PyResult<IntTuple> {
    if let Ok(text) = value.cast::<PyString>() {
        return text.to_str()?.parse().map_err(|error| refuse(value.py(), &error));
    }
    if value.cast::<PyInt>().is_ok() {
        let overflow = |_| refuse(value.py(), &Error::Overflow { what: "a number" });
        return value.extract::<i64>().map(IntTuple::Int).map_err(overflow);
    }
    let Ok(items) = value.cast::<PyTuple>() else {
        return Err(PyTypeError::new_err(format!(
            "an int or a tuple of such is asked, not {}",
            value.get_type().name()?
        )));
    };
    if depth > MAX_DEPTH {
        let error = Error::TooLarge { what: "nesting", got: depth as i64, most: MAX_DEPTH as i64 };
        return Err(refuse(value.py(), &error));
    }
    Ok(IntTuple::Tuple(items.iter().map(|item| int_tuple(&item, depth + 1)).collect::<PyResult<_>>()?))
}

fn to_python<'py>(py: Python<'py>, tuple: &IntTuple) -> PyResult<Bound<'py, PyAny>> {
    match tuple {
        IntTuple::Int(n) => Ok(n.into_pyobject(py)?.into_any()),
        IntTuple::Tuple(items) => {
            let items = items.iter().map(|item| to_python(py, item)).collect::<PyResult<Vec<_>>>()?;
            Ok(PyTuple::new(py, items)?.into_any())
        }
    }
}

/// A coordinate; None leaves a mode whole.
fn read_coord(value: Any<'_, '_>, depth: usize) -> PyResult<Coord> {
    if value.is_none() {
        return Ok(Coord::All);
    }
    if let Ok(text) = value.cast::<PyString>() {
        return text.to_str()?.parse().map_err(|error| refuse(value.py(), &error));
    }
    match value.cast::<PyTuple>() {
        Ok(items) if depth <= MAX_DEPTH => {
            Ok(Coord::Tuple(items.iter().map(|item| read_coord(&item, depth + 1)).collect::<PyResult<_>>()?))
        }
        _ => match int_tuple(value, depth)? {
            IntTuple::Int(at) => Ok(Coord::At(at)),
            IntTuple::Tuple(_) => Err(PyTypeError::new_err("a coordinate is an int, None or a tuple of such")),
        },
    }
}

/// A layout, an int n (n:1), a tuple of tilers (by mode), None (a mode left whole), or text.
fn read_tiler(value: Any<'_, '_>, depth: usize) -> PyResult<Tiler> {
    if value.is_none() {
        return Ok(Tiler::Whole);
    }
    if let Ok(layout) = value.cast::<PyLayout>() {
        return Ok(Tiler::Layout(layout.get().plain(value.py())?.clone()));
    }
    if let Ok(text) = value.cast::<PyString>() {
        return text.to_str()?.parse().map_err(|error| refuse(value.py(), &error));
    }
    match value.cast::<PyTuple>() {
        Ok(items) if depth <= MAX_DEPTH => {
            Ok(Tiler::ByMode(items.iter().map(|item| read_tiler(&item, depth + 1)).collect::<PyResult<_>>()?))
        }
        _ => {
            let layout = Layout::column_major(int_tuple(value, depth)?).map_err(|error| refuse(value.py(), &error))?;
            Ok(Tiler::Layout(layout))
        }
    }
}

fn read_arrangement(py: Python<'_>, name: &str) -> PyResult<Arrangement> {
    match name {
        "logical" => Ok(Arrangement::Logical),
        "zipped" => Ok(Arrangement::Zipped),
        "tiled" => Ok(Arrangement::Tiled),
        "flat" => Ok(Arrangement::Flat),
        _ => {
            let allowed = "logical, zipped, tiled, flat".to_owned();
            Err(refuse(py, &Error::Word { what: "arrangement", got: name.to_owned(), allowed }))
        }
    }
}

/// A layout: shape and stride, a function from coordinates to integers.
#[pyclass(name = "Layout", module = "rapt.layout", frozen, eq, hash)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyLayout(ComposedLayout);

impl PyLayout {
    /// Without swizzle and offset, as the algebra asks.
    fn plain(&self, py: Python<'_>) -> PyResult<&Layout> {
        self.0.plain().ok_or_else(|| {
            let why = "the algebra takes layouts without swizzle and offset".to_owned();
            refuse(py, &Error::NoSuchLayout { operation: "algebra", layout: self.0.to_string(), why })
        })
    }

    fn with(&self, py: Python<'_>, f: impl FnOnce(&Layout) -> rapt::layout::Result<Layout>) -> PyResult<Self> {
        f(self.plain(py)?).map(|layout| PyLayout(layout.into())).map_err(|error| refuse(py, &error))
    }
}

#[pymethods]
impl PyLayout {
    #[new]
    #[pyo3(signature = (shape, stride = None, /))]
    fn new(shape: Any<'_, '_>, stride: Option<Any<'_, '_>>) -> PyResult<Self> {
        let py = shape.py();
        if let (Ok(text), None) = (shape.cast::<PyString>(), stride) {
            return text.to_str()?.parse().map(PyLayout).map_err(|error| refuse(py, &error));
        }
        let shape = int_tuple(shape, 0)?;
        let layout = match stride {
            Some(stride) => Layout::new(shape, int_tuple(stride, 0)?),
            None => Layout::column_major(shape),
        };
        layout.map(|layout| PyLayout(layout.into())).map_err(|error| refuse(py, &error))
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, self.0.layout().shape())
    }

    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, self.0.layout().stride())
    }

    #[getter]
    fn swizzle(&self) -> Option<String> {
        (!self.0.swizzle().is_identity()).then(|| self.0.swizzle().to_string())
    }

    #[getter]
    fn offset(&self) -> i64 {
        self.0.offset()
    }

    #[getter]
    fn size(&self) -> i64 {
        self.0.layout().size()
    }

    #[getter]
    fn cosize(&self) -> i64 {
        self.0.layout().cosize()
    }

    #[getter]
    fn largest(&self) -> i64 {
        self.0.layout().range().1
    }

    #[getter]
    fn rank(&self) -> usize {
        self.0.layout().rank()
    }

    #[getter]
    fn depth(&self) -> usize {
        self.0.layout().depth()
    }

    fn __call__(&self, py: Python<'_>, coord: Any<'_, '_>) -> PyResult<i64> {
        self.0.at_coord(&int_tuple(coord, 0)?).map_err(|error| refuse(py, &error))
    }

    fn offsets(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        self.0.offsets().map_err(|error| refuse(py, &error))
    }

    fn coord<'py>(&self, py: Python<'py>, index: i64) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.0.layout().coord_of(index).map_err(|error| refuse(py, &error))?)
    }

    fn compose(&self, py: Python<'_>, other: Any<'_, '_>) -> PyResult<Self> {
        let tiler = read_tiler(other, 0)?;
        let inner = self.0.layout().compose_tiler(&tiler);
        let composed = inner.and_then(|inner| ComposedLayout::new(self.0.swizzle(), self.0.offset(), inner));
        composed.map(PyLayout).map_err(|error| refuse(py, &error))
    }

    #[pyo3(signature = (target = None))]
    fn complement(&self, py: Python<'_>, target: Option<i64>) -> PyResult<Self> {
        self.with(py, |layout| layout.complement(target.unwrap_or(layout.cosize())))
    }

    #[pyo3(signature = (tiler, arrangement = "logical"))]
    fn divide(&self, py: Python<'_>, tiler: Any<'_, '_>, arrangement: &str) -> PyResult<Self> {
        let (tiler, arrangement) = (read_tiler(tiler, 0)?, read_arrangement(py, arrangement)?);
        self.with(py, |layout| layout.divide(&tiler, arrangement))
    }

    #[pyo3(signature = (tiler, arrangement = "logical"))]
    fn product(&self, py: Python<'_>, tiler: Any<'_, '_>, arrangement: &str) -> PyResult<Self> {
        let (tiler, arrangement) = (read_tiler(tiler, 0)?, read_arrangement(py, arrangement)?);
        self.with(py, |layout| layout.product(&tiler, arrangement))
    }

    fn blocked_product(&self, py: Python<'_>, other: &Bound<'_, PyLayout>) -> PyResult<Self> {
        let other = other.get().plain(py)?.clone();
        self.with(py, |layout| layout.blocked_product(&other))
    }

    fn raked_product(&self, py: Python<'_>, other: &Bound<'_, PyLayout>) -> PyResult<Self> {
        let other = other.get().plain(py)?.clone();
        self.with(py, |layout| layout.raked_product(&other))
    }

    #[pyo3(signature = (by = None))]
    fn coalesce(&self, py: Python<'_>, by: Option<Any<'_, '_>>) -> PyResult<Self> {
        let profile = by.map(|by| int_tuple(by, 0)).transpose()?;
        self.with(py, |layout| match profile {
            Some(profile) => layout.coalesce_by(&profile),
            None => Ok(layout.coalesce()),
        })
    }

    fn filter(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, |layout| Ok(layout.filter()))
    }

    fn flatten(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, |layout| Ok(layout.flatten()))
    }

    fn right_inverse(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, Layout::right_inverse)
    }

    fn left_inverse(&self, py: Python<'_>) -> PyResult<Self> {
        self.with(py, Layout::left_inverse)
    }

    fn slice(&self, py: Python<'_>, coordinate: Any<'_, '_>) -> PyResult<(Self, i64)> {
        let sliced = self.plain(py)?.slice(&read_coord(coordinate, 0)?).map_err(|error| refuse(py, &error))?;
        Ok((PyLayout(sliced.0.into()), sliced.1))
    }

    fn recast(&self, py: Python<'_>, from_bits: i64, to_bits: i64) -> PyResult<Self> {
        self.with(py, |layout| layout.recast(from_bits, to_bits))
    }

    fn __getitem__(&self, py: Python<'_>, at: usize) -> PyResult<Self> {
        let layout = self.plain(py)?;
        let refused =
            || Error::Rank { operation: "mode", layout: layout.to_string(), rank: layout.rank(), asked: at + 1 };
        layout.mode(at).map(|mode| PyLayout(mode.into())).ok_or_else(|| refuse(py, &refused()))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Layout({:?})", self.0.to_string())
    }
}

fn grid(what: &str, window: Window) -> rapt::layout::Result<Grid> {
    if what.starts_with(|c: char| c.is_ascii_lowercase()) {
        Grid::of_atom(&Atom::named(what)?, window)
    } else {
        Grid::of_layout(&what.parse()?, window)
    }
}

/// A layout or an atom, as text or as SVG.
#[pyfunction]
#[pyo3(signature = (what, rows, cols, svg, /))]
pub(crate) fn layout_show(py: Python<'_>, what: &str, rows: usize, cols: usize, svg: bool) -> PyResult<String> {
    let window = Window { rows: rows.min(1024), cols: cols.min(1024) };
    let grid = grid(what, window).map_err(|error| refuse(py, &error))?;
    Ok(if svg { grid.to_svg() } else { grid.to_text(false) })
}

/// Names of the atoms that the atlas lists.
#[pyfunction]
pub(crate) fn layout_atoms() -> Vec<String> {
    atlas::names()
}

/// An atom as JSON.
#[pyfunction]
#[pyo3(signature = (name, /))]
pub(crate) fn layout_atom(py: Python<'_>, name: &str) -> PyResult<String> {
    Atom::named(name).map(|atom| atom_json(&atom).to_string()).map_err(|error| refuse(py, &error))
}

/// (number, unit) in another unit.
#[pyfunction]
#[pyo3(signature = (number, unit, to, /))]
pub(crate) fn layout_convert(py: Python<'_>, number: i64, unit: &str, to: &str) -> PyResult<i64> {
    let convert = || Quantity { number, unit: unit.parse()? }.to(to.parse()?);
    convert().map(|quantity| quantity.number).map_err(|error| refuse(py, &error))
}

/// Whether two numbers with units are one place.
#[pyfunction]
#[pyo3(signature = (left, left_unit, right, right_unit, /))]
pub(crate) fn layout_same(py: Python<'_>, left: i64, left_unit: &str, right: i64, right_unit: &str) -> PyResult<bool> {
    let unit = |text: &str| text.parse::<Unit>();
    let same =
        || Quantity { number: left, unit: unit(left_unit)? }.same(Quantity { number: right, unit: unit(right_unit)? });
    same().map_err(|error| refuse(py, &error))
}

/// For each check of a TOML text: the report as JSON, with its map, as text, and its map as SVG.
#[pyfunction]
#[pyo3(signature = (text, /))]
pub(crate) fn layout_check(py: Python<'_>, text: &str) -> PyResult<Vec<(String, String, String)>> {
    let reports = py.detach(|| check::parse(text)?.iter().map(check::Check::run).collect::<Result<Vec<_>, Error>>());
    let told = reports.map_err(|error| refuse(py, &error))?.into_iter();
    Ok(told.map(|report| (report.to_json(true).to_string(), report.to_string(), report_svg(&report))).collect())
}

/// For each check of a TOML text and each seed: what came of it as JSON, and as text.
#[pyfunction]
#[pyo3(signature = (text, seeds, softmax, /))]
#[allow(clippy::needless_pass_by_value, reason = "pyo3 hands over what it extracted")]
pub(crate) fn layout_emulate(
    py: Python<'_>,
    text: &str,
    seeds: Vec<u64>,
    softmax: bool,
) -> PyResult<Vec<(String, String)>> {
    let outcomes = py.detach(|| -> Result<Vec<_>, Error> {
        let checks = check::parse(text)?;
        let cases = checks.iter().flat_map(|check| seeds.iter().map(move |seed| (check, *seed)));
        cases.map(|(check, seed)| emulate::run(check, Case { seed, softmax })).collect()
    });
    let told = outcomes.map_err(|error| refuse(py, &error))?.into_iter();
    Ok(told.map(|outcome| (outcome.to_json().to_string(), outcome.to_string())).collect())
}
