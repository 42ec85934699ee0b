"""The table of image sets: what each contains, where it is published, its checksums and its licence.

The checksums of files are md5, because publishers and torchvision list these. Those of MNIST, Fashion-MNIST, EMNIST, SVHN
and the two GTSRB test files come from torchvision, those of CIFAR from its home page. Those of the GTSRB training images, of
notMNIST and of caltech-101.zip (torchvision takes other archives, or none) are the values on which several public loaders
agree. The sha256 are those of TensorFlow Datasets, where it takes the same files; their sizes are the same as well. None
could be compared with the files themselves, because nothing was downloaded when this was written: `hatrack data list` says
so of every set whose arrays have no digest here. All sizes are those of the published files. Licences are stated as far as
we know; the page of the source decides.
The digests are sha256 over the arrays (see `cache.digest`), computed from complete sets in their canonical order. For sets
without a digest, the number of images and the labels are checked instead.
"""

from dataclasses import dataclass
from typing import NamedTuple


class File(NamedTuple):
    """One published file.

    Attributes:
        name: its name.
        md5: its checksum, as its publisher or torchvision lists it.
        size: its size in bytes.
        bases: the addresses of folders that have it, each ending in "/"; they are tried one after the other, https first.
        sha256: a stronger checksum, which is compared in place of md5; "" if no source publishes one.
    """

    name: str
    md5: str
    size: int
    bases: tuple[str, ...]
    sha256: str = ""

    @property
    def checksum(self) -> str:
        """The strongest checksum that is known, with its kind in front: "sha256:..."."""
        return f"sha256:{self.sha256}" if self.sha256 else f"md5:{self.md5}"


@dataclass(frozen=True)
class DataSet:
    """An image set.

    Attributes:
        title: what its images show.
        classes: the number of classes.
        shape: the shape of an image in the data folder: 28 x 28 for gray images, 32 x 32 x 3 for colour images.
        train: the number of training images in the complete set.
        test: the number of test images in the complete set.
        home: the address of its web page.
        licence: its licence, and the authors.
        files: the published files; none if it cannot be downloaded.
        digest: `cache.digest` of the complete set; "" if unknown.
        test_share: the share of every class that becomes the test set if a copy has no test set of its own.
    """

    title: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    home: str
    licence: str
    files: tuple[File, ...] = ()
    digest: str = ""
    test_share: float = 0.1

    @property
    def size(self) -> int:
        """The number of bytes to download."""
        return sum(file.size for file in self.files)


GRAY, COLOUR = (28, 28), (32, 32, 3)
MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FASHION = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
EMNIST = ("https://biometrics.nist.gov/cs_links/EMNIST/",)
CIFAR = ("https://www.cs.toronto.edu/~kriz/",)
SVHN = ("http://ufldl.stanford.edu/housenumbers/",)
GTSRB = ("https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/",)
NOTMNIST = ("https://commondatastorage.googleapis.com/books1000/", "http://yaroslavvb.com/upload/notMNIST/")
CALTECH = ("https://data.caltech.edu/records/mzrjq-6wc02/files/",)

SETS = {
    "mnist": DataSet(
        "MNIST handwritten digits",
        10,
        GRAY,
        60_000,
        10_000,
        "https://yann.lecun.com/exdb/mnist/",
        "CC BY-SA 3.0 (LeCun, Cortes, Burges)",
        (
            File(
                "train-images-idx3-ubyte.gz",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                9_912_422,
                MNIST,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                "d53e105ee54ea40749a09fcbcd1e9432",
                28_881,
                MNIST,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                "9fb629c4189551a2d022fa330f9573f3",
                1_648_877,
                MNIST,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                "ec29112dd5afa0611ce80d1b7f02629c",
                4_542,
                MNIST,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        "e5ea4841dd6fde90b155843179ce5756a4864227194eec7fb09d7cfc4cf702a5",
    ),
    "fashion-mnist": DataSet(
        "Fashion-MNIST clothes",
        10,
        GRAY,
        60_000,
        10_000,
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT (Zalando)",
        (
            File(
                "train-images-idx3-ubyte.gz",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                26_421_880,
                FASHION,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                "25c81989df183df01b3e8a0aad5dffbe",
                29_515,
                FASHION,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                "bef4ecab320f06d8554ea6380940ec79",
                4_422_102,
                FASHION,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                "bb300cfdad3c16e7a12a480ee83cd310",
                5_148,
                FASHION,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        "8294d2ca571ee42977a0b2dbf2f2f22ac6655a869e4497e2cd010da5acf40c92",
    ),
    "notmnist": DataSet(  # 18,726 files, two of them empty; published without a split
        "notMNIST (small): letters A to J of many fonts",
        10,
        GRAY,
        16_854,
        1_870,
        "https://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html",
        "none stated (Bulatov)",
        (File("notMNIST_small.tar.gz", "c9890a473a9769fda4bdf314aaf500dd", 8_458_043, NOTMNIST),),
    ),
    "cifar10": DataSet(
        "CIFAR-10 objects",
        10,
        COLOUR,
        50_000,
        10_000,
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "none stated (Krizhevsky)",
        (
            File(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
                CIFAR,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        "1eb24bd58cf3ed1d84d7cbfb87e7c4564b62f3a6170140335ca678b272e89369",
    ),
    "cifar100": DataSet(
        "CIFAR-100 objects, fine labels",
        100,
        COLOUR,
        50_000,
        10_000,
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "none stated (Krizhevsky)",
        (
            File(
                "cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                168_513_733,
                CIFAR,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    ),
    "svhn": DataSet(
        "SVHN house numbers, cropped digits",
        10,
        COLOUR,
        73_257,
        26_032,
        "http://ufldl.stanford.edu/housenumbers/",
        "non-commercial use (Netzer et al.)",
        (
            File(
                "train_32x32.mat",
                "e26dedcc434d2e4c54c9b2d4a06d8373",
                182_040_794,
                SVHN,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            File(
                "test_32x32.mat",
                "eb5a983be6a315427106f1b164d9cef3",
                64_275_384,
                SVHN,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
    "gtsrb": DataSet(  # torchvision downloads another training archive, with 26,640 images
        "GTSRB traffic signs, whole frames",
        43,
        COLOUR,
        39_209,
        12_630,
        "https://benchmark.ini.rub.de/gtsrb_dataset.html",
        "none stated (Stallkamp et al.)",
        (
            File("GTSRB_Final_Training_Images.zip", "f33fd80ac59bff73c82d25ab499e03a3", 276_294_756, GTSRB),
            File("GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185", 88_978_620, GTSRB),
            File("GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5", 99_620, GTSRB),
        ),
    ),
    "facescrub": DataSet(  # published only as a list of addresses
        "FaceScrub, 100 people",
        100,
        COLOUR,
        20_600,
        2_289,
        "http://vintage.winklerbros.net/facescrub.html",
        "non-commercial research, on request (Ng, Winkler)",
    ),
    "emnist-letters": DataSet(
        "EMNIST handwritten letters",
        26,
        GRAY,
        124_800,
        20_800,
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "none stated (NIST; Cohen et al.)",
        (
            File(
                "gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                561_753_746,
                EMNIST,
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
            ),
        ),
    ),
    "caltech101": DataSet(  # published without a split
        "Caltech-101 objects, without the background class",
        101,
        COLOUR,
        6_941,
        1_736,
        "https://data.caltech.edu/records/mzrjq-6wc02",
        "CC BY 4.0 (Li, Andreeto, Ranzato, Perona)",
        (
            File(
                "caltech-101.zip",
                "3138e1922a9193bfa496528edbbc45d0",
                137_414_764,
                CALTECH,
                "331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
            ),
        ),
        test_share=0.2,
    ),
}
SAMPLES = ("mnist", "fashion-mnist")  # a small part of these comes with the package
PARTS = {"svhn-part": "svhn"}  # a file of this name contains only a part of the set
