//! .npy files, as far as attention and programs need them: formats 1.0 to 3.0, little-endian; float64, float32, float16, the
//! integers that programs may have, and bool.
//!
//! ```text
//! 93 'N' 'U' 'M' 'P' 'Y' | major minor | header length (u16, from 2.0 on u32) | header | elements
//! header: {'descr': '<f4', 'fortran_order': False, 'shape': (1, 8, 77, 64), }
//! ```
//! An array in Fortran order is not turned round: it is viewed through its strides. Anything else is refused by name.
//! Deliberately absent: structured dtypes, pickled objects, big-endian files, and any conversion.

use std::fmt;
use std::path::{Path, PathBuf};

use half::f16;
use rapt::{DType, Element, Shape, Strides, Tensor, View, ViewMut};

const MAGIC: [u8; 6] = [0x93, b'N', b'U', b'M', b'P', b'Y'];
/// A header starts on this boundary when it is written.
const ALIGN: usize = 64;

/// Why a file was refused.
#[derive(Debug)]
pub(crate) struct Refused {
    path: PathBuf,
    why: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.why)
    }
}

impl std::error::Error for Refused {}

macro_rules! elements {
    ($($variant:ident($ty:ty) = $descr:literal, $dtype:ident;)*) => {
        /// The elements of a file, in the order in which they lie there.
        #[derive(Debug, PartialEq)]
        enum Elements {
            $($variant(Vec<$ty>),)*
            Bool(Vec<bool>),
        }

        impl Elements {
            /// The elements of this `descr` of a header.
            fn read(descr: &str, data: &[u8], numel: usize) -> Result<Elements, String> {
                Ok(match descr {
                    $($descr => Elements::$variant(decode(data, numel, <$ty>::from_le_bytes)?),)*
                    "|b1" => Elements::Bool(decode(data, numel, |[byte]: [u8; 1]| byte != 0)?),
                    other => return Err(unknown(other)),
                })
            }

            /// These elements where they lie.
            fn view(&self, tensor: &'static str, shape: Shape, strides: Strides) -> rapt::Result<View<'_>> {
                match self {
                    $(Elements::$variant(elements) => View::strided(tensor, elements, 0, shape, strides),)*
                    Elements::Bool(elements) => View::strided(tensor, elements, 0, shape, strides),
                }
            }

            /// The same to be written.
            fn view_mut(&mut self, tensor: &'static str, shape: Shape, strides: Strides) -> rapt::Result<ViewMut<'_>> {
                match self {
                    $(Elements::$variant(elements) => ViewMut::strided(tensor, elements, 0, shape, strides),)*
                    Elements::Bool(elements) => ViewMut::strided(tensor, elements, 0, shape, strides),
                }
            }
        }

        /// `descr` and bytes of a tensor's elements.
        fn encoded(tensor: &Tensor) -> rapt::Result<(&'static str, Vec<u8>)> {
            fn bytes<T: Element, const N: usize>(tensor: &Tensor, of: fn(T) -> [u8; N]) -> rapt::Result<Vec<u8>> {
                Ok(tensor.to_vec::<T>()?.into_iter().flat_map(of).collect())
            }
            match tensor.dtype() {
                $(DType::$dtype => Ok(($descr, bytes(tensor, <$ty>::to_le_bytes)?)),)*
                DType::Bool => Ok(("|b1", bytes(tensor, |x: bool| [u8::from(x)])?)),
                got => Err(rapt::Error::UnsupportedDtype {
                    tensor: "out",
                    got,
                    allowed: vec![$(DType::$dtype,)* DType::Bool],
                }),
            }
        }
    };
}

elements! {
    F64(f64) = "<f8", F64;
    F32(f32) = "<f4", F32;
    F16(f16) = "<f2", F16;
    I64(i64) = "<i8", I64;
    I32(i32) = "<i4", I32;
    I16(i16) = "<i2", I16;
    I8(i8) = "|i1", I8;
    U8(u8) = "|u1", U8;
}

fn unknown(descr: &str) -> String {
    format!(
        "dtype {descr:?} is not served; allowed are '<f8', '<f4', '<f2' (floats), '<i8', '<i4', '<i2', '|i1', '|u1' \
         (integers) and '|b1' (bool)"
    )
}

/// An array of a file.
#[derive(Debug, PartialEq)]
pub(crate) struct Array {
    elements: Elements,
    shape: Shape,
    strides: Strides,
}

impl Array {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Array, Refused> {
        let refused = |why| Refused { path: path.to_owned(), why };
        let bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
        parse(&bytes).map_err(refused)
    }

    /// The array where it lies.
    pub(crate) fn view(&self, tensor: &'static str) -> rapt::Result<View<'_>> {
        self.elements.view(tensor, self.shape, self.strides)
    }

    /// The array as `dtype`: where that is a float of 8 bits, a file of its bytes, as .npy files have no such dtype.
    pub(crate) fn view_as(&self, tensor: &'static str, dtype: DType) -> rapt::Result<View<'_>> {
        let view = self.view(tensor)?;
        let is_of_bytes = view.dtype() == DType::U8 && dtype.size_bytes() == 1 && dtype != DType::I8;
        if is_of_bytes { view.reinterpreted(tensor, dtype) } else { Ok(view) }
    }

    /// The array where it lies, to be written: the file stays as it is.
    pub(crate) fn view_mut(&mut self, tensor: &'static str) -> rapt::Result<ViewMut<'_>> {
        self.elements.view_mut(tensor, self.shape, self.strides)
    }
}

fn parse(bytes: &[u8]) -> Result<Array, String> {
    let rest = bytes.strip_prefix(&MAGIC).ok_or("no .npy file: its first six bytes are others")?;
    let short = "ends within its header";
    let (version, rest) = rest.split_first_chunk::<2>().ok_or(short)?;
    let (len, rest) = match version[0] {
        1 => rest.split_first_chunk().map(|(len, rest)| (usize::from(u16::from_le_bytes(*len)), rest)),
        2 | 3 => rest.split_first_chunk().map(|(len, rest)| (u32::from_le_bytes(*len) as usize, rest)),
        other => return Err(format!(".npy format {other}.{} is not known; 1.0 to 3.0 are", version[1])),
    }
    .ok_or(short)?;
    let (header, data) = rest.split_at_checked(len).ok_or(short)?;
    let header = std::str::from_utf8(header).map_err(|_| "its header is no text")?;
    let descr = quoted(value(header, "descr")?)?;
    let shape = sizes(value(header, "shape")?)?;
    let strides = match value(header, "fortran_order")? {
        text if text.starts_with("False") => shape.contiguous(),
        text if text.starts_with("True") => columns_first(&shape),
        _ => return Err("fortran_order is neither True nor False".into()),
    };
    let (strides, numel) = strides.zip(shape.numel()).ok_or("its shape overflows")?;
    let elements = Elements::read(descr, data, numel)?;
    Ok(Array { elements, shape, strides })
}

fn decode<T, const N: usize>(data: &[u8], numel: usize, element: fn([u8; N]) -> T) -> Result<Vec<T>, String> {
    let (elements, rest) = data.as_chunks::<N>();
    if elements.len() != numel || !rest.is_empty() {
        return Err(format!("holds {} bytes of elements, its shape needs {numel} elements of {N} bytes", data.len()));
    }
    Ok(elements.iter().map(|&bytes| element(bytes)).collect())
}

/// What follows `'key':` in a header.
fn value<'a>(header: &'a str, key: &str) -> Result<&'a str, String> {
    let rest = [format!("'{key}'"), format!("\"{key}\"")].iter().find_map(|key| header.split_once(key.as_str()));
    let after = rest.and_then(|(_, rest)| rest.trim_start().strip_prefix(':'));
    after.map(str::trim_start).ok_or_else(|| format!("its header has no {key}"))
}

fn quoted(text: &str) -> Result<&str, String> {
    let of = |quote| text.strip_prefix(quote)?.split_once(quote).map(|(inner, _)| inner);
    of('\'').or_else(|| of('"')).ok_or_else(|| "its dtype is a structure; a plain one is needed".into())
}

fn sizes(text: &str) -> Result<Shape, String> {
    let wrong = || "its shape is no tuple of sizes".to_owned();
    let inner = text.strip_prefix('(').and_then(|rest| rest.split_once(')')).ok_or_else(wrong)?.0;
    let fields = inner.split(',').map(str::trim).filter(|size| !size.is_empty());
    let sizes: Vec<usize> = fields.map(|size| size.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    Shape::new(&sizes).ok_or_else(|| format!("has {} dimensions; at most {} are served", sizes.len(), rapt::MAX_RANK))
}

/// Strides of an array whose first dimension lies closest together.
fn columns_first(shape: &Shape) -> Option<Strides> {
    let mut turned: Vec<usize> = shape.to_vec();
    turned.reverse();
    let mut strides: Vec<isize> = Shape::new(&turned)?.contiguous()?.to_vec();
    strides.reverse();
    Strides::new(&strides)
}

/// Writes a tensor, format 1.0, in C order.
pub(crate) fn write(path: &Path, tensor: &Tensor) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = encode(tensor)?;
    std::fs::write(path, bytes).map_err(|error| Refused { path: path.to_owned(), why: error.to_string() }.into())
}

fn encode(tensor: &Tensor) -> rapt::Result<Vec<u8>> {
    let (descr, elements) = encoded(tensor)?;
    let sizes: String = tensor.shape().iter().map(|size| format!("{size}, ")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", sizes.trim_end());
    let before = MAGIC.len() + 4;
    let padded = (before + header.len() + 1).next_multiple_of(ALIGN) - before;
    header.extend(std::iter::repeat_n(' ', padded - header.len() - 1));
    header.push('\n');
    let len = u16::try_from(header.len()).expect("at most eight sizes");
    Ok([&MAGIC[..], &[1, 0], &len.to_le_bytes(), header.as_bytes(), &elements].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let len = u16::try_from(header.len()).unwrap();
        [&MAGIC[..], &[1, 0], &len.to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn a_file_in_fortran_order_is_viewed_through_its_strides() {
        let header = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n";
        let data: Vec<u8> = [1f32, 4.0, 2.0, 5.0, 3.0, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let array = parse(&file(header, &data)).unwrap();
        let view = array.view("q").unwrap();
        assert_eq!((&**view.shape(), &**view.strides()), (&[2, 3][..], &[1, 2][..]));
    }

    #[test]
    fn what_is_written_is_read_again() {
        for shape in [vec![], vec![3], vec![2, 0, 4], vec![1, 2, 3, 4]] {
            let tensor = Tensor::zeros(DType::F16, Shape::new(&shape).unwrap()).unwrap();
            let bytes = encode(&tensor).unwrap();
            let array = parse(&bytes).unwrap();
            assert_eq!((array.shape, array.elements), (*tensor.shape(), Elements::F16(tensor.to_vec().unwrap())));
            let data = tensor.shape().numel().unwrap() * 2;
            assert_eq!((bytes.len() - data) % ALIGN, 0, "elements are aligned");
        }
    }

    #[test]
    fn what_is_no_such_file_is_refused_by_name() {
        let check = |bytes: &[u8], expect: &str| {
            let why = parse(bytes).unwrap_err();
            assert!(why.contains(expect), "{why}");
        };
        let header =
            |descr: &str, shape: &str| format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}");
        check(b"PK\x03\x04", "no .npy file");
        check(&MAGIC, "within its header");
        check(&[&MAGIC[..], &[9, 0, 0, 0]].concat(), "9.0");
        check(&[&MAGIC[..], &[1, 0, 255, 255]].concat(), "within its header");
        check(&file("{}", &[]), "no descr");
        check(&file(&header(">f4", "(1,)"), &[0; 4]), "\">f4\" is not served");
        check(&file(&header("|V2", "(1,)"), &[0; 2]), "\"|V2\" is not served");
        check(&file(&header("<f4", "(2,)"), &[0; 7]), "holds 7 bytes");
        check(&file(&header("<f4", "(2,)"), &[0; 12]), "holds 12 bytes");
        check(&file(&header("<f4", "(18446744073709551615, 2)"), &[]), "overflows");
        check(&file(&header("<f4", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), &[0; 4]), "9 dimensions");
        check(&file(&header("<f4", "3"), &[]), "no tuple");
        check(&file("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", &[]), "structure");
        for end in 0..file(&header("<f8", "(1,)"), &[0; 8]).len() {
            assert!(parse(&file(&header("<f8", "(1,)"), &[0; 8])[..end]).is_err(), "cut at {end}");
        }
    }
}
