"""The words from which prompts are put together."""

TOPICS = """
photosynthesis; the water cycle; black holes; the French Revolution; inflation; supply and demand; vaccines; plate
tectonics; the Roman Empire; jazz; impressionism; the periodic table; gravity; electric cars; renewable energy; coral
reefs; the stock market; machine learning; neural networks; climate change; the human heart; digestion; sleep; dreams;
meditation; yoga; nutrition; protein; vitamins; bread; cheese; coffee; tea; chocolate; wine; gardening; composting;
bees; butterflies; whales; wolves; dinosaurs; volcanoes; earthquakes; hurricanes; deserts; rainforests; glaciers;
rivers; the moon; Mars; the Solar System; comets; telescopes; rockets; satellites; airplanes; trains; bicycles; ships;
bridges; skyscrapers; concrete; steel; glass; plastic; paper; silk; cotton; dyes; perfume; soap; batteries; magnets;
lasers; radio; television; the internet; email; encryption; passwords; databases; operating systems; compilers;
programming languages; version control; cloud computing; robots; 3D printing; drones; photography; film making;
animation; video games; chess; poker; football; basketball; tennis; swimming; marathon running; mountain climbing;
sailing; surfing; skiing; the Olympic Games; democracy; constitutions; taxes; insurance; mortgages; budgets; saving
money; small businesses; marketing; negotiation; leadership; teamwork; time management; public speaking; job
interviews; resumes; remote work; education; homework; reading; libraries; poetry; novels; Shakespeare; Greek
mythology; Norse mythology; fairy tales; philosophy; ethics; logic; probability; statistics; algebra; geometry;
calculus; prime numbers; fractions; percentages; measurement; maps; time zones; calendars; languages; translation;
grammar; spelling; handwriting; music theory; the piano; the guitar; the violin; drums; opera; ballet; hip hop;
painting; sculpture; pottery; knitting; sewing; cooking; baking; barbecue; vegetarian food; allergies; headaches; the
common cold; broken bones; exercise; stretching; posture; eyesight; hearing; teeth; skin care; pets; cats; dogs;
parrots; goldfish; horses; farms; tractors; soil; trees; mushrooms; flowers; roses; cactus; weather; clouds; thunder;
snow; rainbows; tides; sharks; dolphins; penguins; elephants; lions; spiders; ants; snakes; frogs; bats; owls
"""

ACTIVITIES = """
bake sourdough bread; plant tomatoes; change a flat tire; learn the guitar; train for a 10k run; write a cover letter;
save for a house; clean a keyboard; paint a bedroom; pack for a week of travel; make a paper airplane; brew coffee;
remove a stain; fix a leaking tap; start a blog; learn Spanish; build a bookshelf; take better photos; sleep better;
stop procrastinating; plan a birthday party; cook rice; sharpen a knife; fold a shirt; tie a tie; set up a router; back
up a laptop; choose a password; write a speech; read faster; remember names; meet new people; apologize to a friend;
ask for a raise; quit a job politely; train a puppy; care for a cactus; clean windows; organize a desk; plan a garden;
make soup; roast vegetables; grill fish; knit a scarf; sew a button; iron a shirt; wash wool; descale a kettle; jump
start a car; check tire pressure; ride a bike in traffic; swim freestyle; do a push-up; stretch before running; hike
safely; pitch a tent; light a campfire; read a map; use a compass; catch a fish; prune roses; mow a lawn; rake leaves;
shovel snow; defrost a freezer; store potatoes; freeze berries; make jam; pickle cucumbers; can peaches; host a dinner;
set a table; write a thank you note; wrap a present; move to a new city; rent an apartment; compare phone plans; read a
contract; file taxes; make a budget; pay off debt; invest small amounts; learn to draw; write a poem; keep a diary;
study for an exam; take notes; give feedback; run a meeting; write an email; make a to-do list; debug a program; test a
website; learn Python; name a company; design a logo; survey customers; price a product; handle complaints
"""

THINGS = """
lamp; bicycle; umbrella; notebook; backpack; lighthouse; compass; violin; clock; mirror; bridge; garden; ship; train;
castle; cave; island; river; mountain; forest; market; library; kitchen; attic; telescope; robot; balloon; kite; drum;
candle; key; letter; map; coin; ring; scarf; boots; teapot; piano; window; door; ladder; wheel; rope; anchor; lantern;
statue; painting; puzzle; basket; blanket; pillow; bottle; jar; spoon; hammer; needle; thread; feather; shell; pebble;
leaf; seed; apple; pear; pumpkin; carrot; loaf; cake; cookie; storm; sunrise; shadow; echo; whisper; secret; promise
"""

ANIMALS = """
fox; owl; rabbit; bear; wolf; mouse; cat; dog; horse; donkey; goat; sheep; crow; sparrow; swan; frog; turtle; snail;
beetle; bee; ant; spider; whale; dolphin; seal; penguin; tiger; lion; elephant; giraffe; monkey; parrot; squirrel;
hedgehog; badger; otter; deer; moose; lizard; dragon
"""

NAMES = """
Anna; Ben; Clara; David; Elena; Felix; Grace; Hugo; Iris; Jonas; Karin; Leo; Maria; Noah; Olivia; Paul; Rosa; Simon;
Tara; Victor; Wendy; Yusuf; Zoe; Amir; Bella; Carlos; Diana; Ethan; Fatima; George; Hana; Ivan; Julia; Kenji; Lucas;
Mei; Nina; Omar; Priya; Quentin; Rachel; Sam; Thomas; Uma; Vera; Walter; Xavier; Yara; Aisha; Boris
"""

SURNAMES = """
Miller; Smith; Garcia; Chen; Patel; Kim; Novak; Rossi; Dubois; Schmidt; Jensen; Okafor; Silva; Tanaka; Ivanov; Brown;
Wilson; Clark; Lewis; Young; Hall; Wright; Green; Baker; Carter; Morris; Rogers; Cook; Bell; Ward
"""

CITIES = """
Paris; London; Berlin; Madrid; Rome; Vienna; Prague; Warsaw; Oslo; Lisbon; Dublin; Athens; Cairo; Nairobi; Lagos; Delhi;
Mumbai; Tokyo; Osaka; Seoul; Beijing; Shanghai; Bangkok; Jakarta; Sydney; Melbourne; Toronto; Montreal; Chicago; Boston;
Denver; Seattle; Austin; Miami; Lima; Bogota; Santiago; Mexico City; Havana; Istanbul
"""

JOBS = """
nurse; teacher; engineer; carpenter; baker; pilot; farmer; lawyer; chef; painter; electrician; plumber; accountant;
librarian; photographer; journalist; architect; dentist; mechanic; gardener; tailor; translator; biologist; chemist;
astronaut; firefighter; police officer; waiter; cashier; programmer; designer; manager; musician; actor; writer
"""

PRODUCTS = """
laptop; phone case; desk lamp; office chair; water bottle; running shoes; winter jacket; coffee maker; toaster; blender;
headphones; keyboard; monitor; printer; camera; tripod; backpack; suitcase; tent; sleeping bag; bicycle helmet; yoga
mat; dumbbells; notebook; fountain pen; wall clock; bookshelf; sofa; mattress; pillow; frying pan; knife set; teapot;
garden hose; lawn mower; drill; ladder; paint; umbrella; sunglasses
"""

GENRES = """
a fairy tale; a mystery; a science fiction story; a funny story; an adventure; a bedtime story; a ghost story; a love
story; a fable with a moral; a diary entry; a letter; a dialogue; a news report; a speech; a short play; a legend
"""

AUDIENCES = """
a child of six; a beginner; a high school student; a college student; a grandmother; a busy manager; a tourist; a new
employee; a scientist from another field; a group of friends; my neighbor; a blog's readers
"""

LANGUAGES = "Python; Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; SQL; Bash; HTML; TypeScript"

CODE_TASKS = """
reverses a string; checks whether a number is prime; computes the factorial of n; returns the n-th Fibonacci number;
sorts a list of numbers; finds the largest number in a list; counts the vowels in a text; checks whether a word is a
palindrome; merges two sorted lists; removes duplicates from a list; converts Celsius to Fahrenheit; reads a file and
counts its lines; writes a dictionary to a JSON file; parses a CSV file; downloads a web page; sends an email; computes
the average of a list; finds the most frequent word in a text; implements binary search; implements bubble sort;
implements quicksort; implements a stack; implements a queue; implements a linked list; implements a binary tree;
traverses a tree in order; finds the shortest path in a graph; solves the tower of Hanoi; computes the greatest common
divisor; converts a number to binary; checks whether two words are anagrams; flattens a nested list; groups words by
length; validates an email address; generates a random password; prints a multiplication table; draws a triangle of
stars; rotates a matrix; multiplies two matrices; transposes a matrix; computes compound interest; counts words in a
sentence; capitalizes each word; finds all files in a folder; renames files; measures how long a function takes; caches
the results of a function; retries a function three times; logs messages to a file; reads command line arguments; opens
a database connection; inserts a row into a table; selects all users older than 30; joins two tables; updates a price;
creates a web server; handles a form; shows a list of items; fetches data from an API; toggles a button; computes the
distance between two points; simulates a dice roll; plays rock paper scissors; guesses a number; keeps a to-do list;
manages a bank account; models a car with a class; models a library of books; checks a leap year; computes the day of
the week; formats a date; counts down from ten; sums the even numbers; finds missing numbers; rounds to two decimals
"""

SYSTEMS = """
You are a helpful assistant.; You are a concise assistant. Answer in one or two sentences.; You are a patient teacher.;
You are an experienced programmer.; You are a friendly travel guide.; You are a professional editor.; You answer in
bullet points.; You are a creative writer.; You are a careful data analyst.; You always explain your reasoning step by
step.; You are a customer support agent.; You are a chef who loves simple food.
"""

OPENERS = """
How; What; Why; Can you; Write; Explain; I want to; I have; Please; Give me; Is it; My; Tell me; Create; Help me; List;
Describe; Compare; When; Where; Who; Which; Do you; Summarize; Translate; Suppose; Let's; Could you; I'm; Find
"""


def words(text: str) -> list[str]:
    """Return the entries of one of the lists above."""
    return [" ".join(entry.split()) for entry in text.split(";")]
